"""Devices with faults, and what ``amp_fx.conformance`` finds on them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

import amp_fx
from amp_fx.regions import autocast_kernels
from tests.regions.device_programs import DEVICE, EXAMPLES, LOW

AUTOCAST, KERNEL = "AutocastPrivateUse1", "PrivateUse1"
aten = torch.ops.aten
_libraries: list[Any] = []


def prepare() -> None:
    """Loads the device, without autocast."""
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("my_device")


def implement(name: str, kernel: Any, key: str) -> None:
    """Registers a kernel of an op, before ``register_device`` adds those that are missing."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(name, kernel, key)
    _libraries.append(library)


def without(key: str) -> Any:
    """Context in which a dispatch key is off, so that a kernel can call its own op."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ExcludeDispatchKeyGuard(keys)


def casting(op: Any, cast: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> Any:
    """Returns an autocast kernel that casts tensors by a function, and changes arguments."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without(AUTOCAST):
            cast_args = [cast(a) if isinstance(a, torch.Tensor) else a for a in args]
            return op(*cast_args, **{**kwargs, **settings})

    return kernel


def to_low(tensor: torch.Tensor) -> torch.Tensor:
    """Casts to the dtype of the region, whatever the tensor is."""
    return tensor.to(torch.get_autocast_dtype(DEVICE))


def to_low_if_float(tensor: torch.Tensor) -> torch.Tensor:
    """Casts floating-point tensors, float64 included."""
    return to_low(tensor) if tensor.is_floating_point() else tensor


def is_float64(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is float64."""
    return tensor.dtype is torch.float64


def is_eligible(tensor: torch.Tensor) -> bool:
    """Returns True if autocast may cast a tensor of the device."""
    return tensor.is_floating_point() and not is_float64(tensor)


def on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns an op on the CPU's copies of its tensors."""
    tree_map = torch.utils._pytree.tree_map_only
    args, kwargs = tree_map(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
    return tree_map(torch.Tensor, lambda tensor: tensor.to(DEVICE), op(*args, **kwargs))


Fault = Callable[[], None]

DEVICES: dict[str, dict[Fault, tuple[str, ...]]] = {}
"""Devices with faults, of which none hides another, or is reported by the same result.

With each fault are the beginnings of the results that report it.
"""


def fault(device: str, *reported: str) -> Callable[[Fault], Fault]:
    """Registers a function that plants a fault in a device."""

    def register(plant: Fault) -> Fault:
        DEVICES.setdefault(device, {})[plant] = reported
        return plant

    return register


def faulty_kernel(device: str, reported: str, op: str, key: str, kernel: Any) -> None:
    """Registers a kernel as a fault of a device."""
    fault(device, reported)(functools.partial(implement, op, kernel, key))


DEVICES["sound"] = {}
FALLTHROUGH = torch.library.fallthrough_kernel

# The softmax is in the low dtype.
faulty_kernel(
    "lists", "aten::softmax.int", "softmax.int", AUTOCAST, casting(aten.softmax.int, to_low)
)
# mm is not in the lists.
faulty_kernel("kernels", "aten::mm (float32)", "mm", AUTOCAST, FALLTHROUGH)
# linear is not in the lists, but addmm and mm are, which it calls.
faulty_kernel("lists", "aten::linear", "linear", AUTOCAST, FALLTHROUGH)
# gelu is in the lists.
faulty_kernel(
    "lists", "aten::gelu", "gelu", AUTOCAST, casting(aten.gelu.default, lambda t: t.float())
)
# bmm casts float64.
faulty_kernel(
    "lists", "aten::bmm (float64)", "bmm", AUTOCAST, casting(aten.bmm.default, to_low_if_float)
)
# mm casts integers.
faulty_kernel(
    "lists",
    "aten::mm (int64)",
    "mm",
    AUTOCAST,
    casting(aten.mm.default, lambda t: t if is_float64(t) else to_low(t)),
)
# mv is in bfloat16 in regions of float16, too.
faulty_kernel(
    "lists",
    "aten::mv (float32)",
    "mv",
    AUTOCAST,
    casting(aten.mv.default, lambda t: t.bfloat16() if is_eligible(t) else t),
)
# mm with out= casts its inputs, so that they do not match the output any more.
faulty_kernel("lists", "torch.mm with out=", "mm.out", AUTOCAST, casting(aten.mm.out, to_low))
# binary_cross_entropy runs in regions.
faulty_kernel("lists", "aten::binary_cross_entropy", "binary_cross_entropy", AUTOCAST, FALLTHROUGH)
# exp rounds to bfloat16 inside.
faulty_kernel(
    "lists", "aten::exp", "exp", KERNEL, lambda x: on_cpu(aten.exp, x).bfloat16().to(x.dtype)
)
# The backward of gelu returns zeros.
faulty_kernel(
    "backward",
    "a step of training",
    "gelu_backward",
    KERNEL,
    lambda grad, *_, **__: torch.zeros_like(grad),
)
# The scale does not shrink after an overflow.
faulty_kernel("backward", "GradScaler: inf", "_amp_update_scale_", KERNEL, lambda scale, *_: scale)


@fault("lists", "aten::addcmul")
def narrow_promotion() -> None:
    """aten::addcmul casts to the low dtype if any of its inputs has it."""

    def kernel(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        low = torch.get_autocast_dtype(DEVICE)
        is_low = any(tensor.dtype is low for tensor in args)
        with without(AUTOCAST):
            return aten.addcmul(*(map(to_low, args) if is_low else args), **kwargs)  # type: ignore[no-any-return]

    implement("addcmul", kernel, AUTOCAST)


@fault("lists", "aten::cumsum (dtype=)")
def ignored_dtype_argument() -> None:
    """aten::cumsum returns float32 although another dtype is requested."""

    def kernel(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        with without(AUTOCAST):
            return torch.cumsum(x, dim, dtype=torch.float32 if is_eligible(x) else dtype)

    implement("cumsum", kernel, AUTOCAST)


@fault("fallthrough", "aten::relu", "aten::add.Tensor")
def no_fallthrough() -> None:
    """Ops without a policy have no kernel in regions."""
    vars(autocast_kernels)["has_backend_fallback"] = lambda _: True


@fault("state", "aten::mm in nested regions")
def lost_state() -> None:
    """aten::mm disables autocast, and does not enable it again."""

    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with without(AUTOCAST):
            result = aten.mm(*(to_low(t) if is_eligible(t) else t for t in (x, y)))
        torch.set_autocast_enabled(DEVICE, False)
        return result  # type: ignore[no-any-return]

    implement("mm", kernel, AUTOCAST)


@fault("kernels", "aten::layer_norm")
def missing_kernel() -> None:
    """layer_norm has no kernel."""

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("native_layer_norm is not implemented for my_device")

    implement("native_layer_norm", kernel, KERNEL)


@fault("kernels", "aten::mv")
def missing_low_kernel() -> None:
    """aten::mv has a kernel for float32 alone."""

    def kernel(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        if matrix.dtype in LOW:
            raise NotImplementedError(f"mv is not implemented for {matrix.dtype}")
        return on_cpu(aten.mv, matrix, vector)  # type: ignore[no-any-return]

    implement("mv", kernel, KERNEL)


def _check_and_unscale(
    is_bad: Callable[[torch.Tensor], torch.Tensor],
    grads: list[torch.Tensor],
    found: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    for grad in grads:
        if is_bad(grad.cpu()).any():
            found.fill_(1.0)
        grad.mul_(inv_scale)


# The check of gradients misses negative infinity, or compares with infinity, which NaN is not.
for device, reported, is_bad in (
    ("lists", "GradScaler: -inf", lambda grad: grad.isnan() | grad.isposinf()),
    ("kernels", "GradScaler: nan", lambda grad: grad.abs() == torch.inf),
):
    faulty_kernel(
        device,
        reported,
        "_amp_foreach_non_finite_check_and_unscale_",
        KERNEL,
        functools.partial(_check_and_unscale, is_bad),
    )


@fault("lists", "checkpoint(use_reentrant=True)")
def module_without_random_state() -> None:
    """``torch.my_device`` lacks a function that checkpoints call."""
    del torch.my_device.get_rng_state  # type: ignore[attr-defined]


def find(faults: dict[Fault, tuple[str, ...]]) -> None:
    """Checks a device with faults."""
    for plant in faults:
        plant()
    amp_fx.register_device(DEVICE, dtypes=LOW)
    report = amp_fx.conformance(DEVICE)
    failed = [result.op for result in report.failures]
    reported = [op for ops in faults.values() for op in ops]
    assert report.passed is (not reported), report
    missing = [op for op in reported if not any(name.startswith(op) for name in failed)]
    assert not missing, report
    sys.stdout.write(f"{len(faults)} faults: {sorted(set(failed))}\n")


PROGRAMS = {name: functools.partial(find, faults) for name, faults in DEVICES.items()}
