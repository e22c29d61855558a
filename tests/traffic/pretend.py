"""Pretends that there is a GPU, as far as inductor queries it before it generates code.

Use it in a separate process, because the changes are permanent. Nothing is launched, and no tensor
has memory.
"""

from __future__ import annotations

import ctypes
import functools
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.csrc import build
from amp_fx.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

CAPABILITY = (9, 0)
"""Compute capability of the GPU that is pretended: that of an H200."""

_FIELDS = {
    "name": "NVIDIA H200 (pretended)",
    "major": CAPABILITY[0],
    "minor": CAPABILITY[1],
    "total_memory": 139 << 30,
    "multi_processor_count": 132,
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
    "L2_cache_size": 50 << 20,
    "gcnArchName": "",
    "uuid": "pretended",
    "is_integrated": 0,
}
PROPERTIES: Any = types.SimpleNamespace(**_FIELDS)
GUARD = Path(__file__).with_name("guard.cpp")


def can_pretend() -> bool:
    """Returns True if this torch was built with CUDA and has Triton, to generate code for CUDA."""
    from torch.utils._triton import has_triton_package

    return torch.version.cuda is not None and bool(has_triton_package())


def pretend_cuda() -> None:
    """Makes torch in this process believe that there is an H200.

    Raises:
        OptionError: This torch was built without CUDA, Triton is missing, or there is a GPU, which
            may be hidden by an empty ``CUDA_VISIBLE_DEVICES``.
    """
    if not can_pretend():
        raise OptionError("code for CUDA needs a CUDA build of torch with Triton; --device cpu")
    if torch.cuda.is_available():
        raise OptionError("there is a GPU: hide it by CUDA_VISIBLE_DEVICES=''")
    _install_guard()
    _replace_questions()
    _replace_driver()
    _fold_constants_on_host()
    _use_flash_attention()


@functools.cache
def guard() -> ctypes.CDLL:
    """Loads the functions of ``guard.cpp``, which are built on first use."""
    name = "amp_fx_guard"
    return ctypes.CDLL(str(build.find(name, GUARD) or build.start(name, GUARD).result()))


def _install_guard() -> None:
    guard().amp_fx_install_guard()
    # FakeTensorMode would ask the driver, or put a guard of its own in the place of ours.
    FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment]
    torch._C._ensureCUDADeviceGuardSet = lambda: None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _NoStream:
    """A stream that nothing is ever put on."""

    cuda_stream = 0
    stream_id = 0

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_event(self, *_: object) -> None:
        """Waits for nothing."""

    def wait_stream(self, *_: object) -> None:
        """Waits for nothing."""


def _replace_questions() -> None:
    """Answers what torch, Dynamo and inductor ask about CUDA."""
    stream = _NoStream()
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_is_compiled": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "synchronize": None,
        "memory_allocated": 0,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "is_current_stream_capturing": False,
        "current_stream": stream,
        "default_stream": stream,
        "get_device_properties": PROPERTIES,
        "get_device_capability": CAPABILITY,
        "get_device_name": PROPERTIES.name,
        "get_arch_list": ["sm_90"],
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    _answer(torch.cuda, answers)
    _answer(torch.cuda.random, answers)
    _answer(
        torch._C,
        {
            "_cuda_getDevice": 0,
            "_cuda_getDeviceCount": 1,
            "_cuda_exchangeDevice": 0,
            "_cuda_maybeExchangeDevice": 0,
            "_cuda_getCurrentRawStream": 0,
            "_cuda_isCurrentStreamCapturing": False,
            "_accelerator_getDeviceIndex": 0,
        },
    )
    _answer(torch.cuda.amp.common, {"amp_definitely_not_available": False})
    # What ``torch.tensor(1.0, device="cuda")`` makes under a fake mode stays on the host first.
    torch._C._set_only_lift_cpu_tensors(True)
    _answer_dynamo(answers)


def _answer(place: Any, answers: dict[str, Any]) -> None:
    for name, value in answers.items():
        if hasattr(place, name):
            setattr(place, name, _always(value))


def _answer_dynamo(answers: dict[str, Any]) -> None:
    """Dynamo's interface of CUDA holds torch's functions, as they were when it was imported."""
    from torch._dynamo.device_interface import CudaInterface

    for place in (CudaInterface, CudaInterface.Worker):
        for name, value in answers.items():
            if hasattr(place, name):
                setattr(place, name, staticmethod(_always(value)))
    CudaInterface.get_raw_stream = staticmethod(_always(0))


def _replace_driver() -> None:
    """Tells Triton what to compile for; it asks its driver, which asks CUDA's."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = CAPABILITY
    answers: dict[str, Any] = {
        "get_current_target": GPUTarget("cuda", 10 * major + minor, 32),
        "get_current_device": 0,
        "get_current_stream": 0,
        "get_device_interface": torch.cuda,
        "get_active_torch_device": torch.device("cuda", 0),
        "is_active": True,
    }
    methods = {name: staticmethod(_always(value)) for name, value in answers.items()}
    driver.set_active(type("NoDriver", (), {**methods, "utils": None})())


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes on the CPU what is to be made on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "device" in given and given["device"] is not None:
            given["device"] = "cpu"
        return func(*args, **given)


def _fold_constants_on_host() -> None:
    """Inductor computes constants of one element, for which it makes real tensors."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    folders: Any = UniformValueConstantFolder
    deduce = folders._deduce_value

    def deduce_on_host(folder: Any, node: Any) -> Any:
        try:
            with _OnHost():  # type: ignore[no-untyped-call]
                return deduce(folder, node)
        except RuntimeError:  # an input was made elsewhere
            return folder.unknown_value

    folders._deduce_value = deduce_on_host


def _use_flash_attention() -> None:
    """Selects the attention kernel of an H200, because torch's choice queries the device."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert attn_mask is None
        assert not enable_gqa
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out

    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA", allow_override=True)
    _kept.append(library)


_kept: list[Any] = []
"""Libraries, whose kernels go when they go."""
