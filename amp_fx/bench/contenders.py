"""The contenders of the benchmark: ways to run a float32 model, with and without amp_fx."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import types
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.numerics import numerics_config
from amp_fx.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from amp_fx.bench.settings import Settings

    Run = Callable[[], object]
    "Runs one unit of work. Inference returns the result of the model."

FLOAT32 = "float32"
NATIVE, AMP_FX, UNCACHED, LIMIT = "native", "amp_fx", "amp_fx-uncached", "limit"
NATIVE_FROZEN, LIMIT_FROZEN = "native-freezing", "limit-freezing"
NATIVE_TUNED, TUNED = "native-autotune", "amp_fx-autotune"
ZENTORCH, OPENVINO = "zentorch", "openvino"
LEAN, UNFROZEN, CACHED = "amp_fx-lean", "amp_fx-unfrozen", "amp_fx-cached"
SEED = 0
LEARNING_RATE = 1e-5
MICRO_BATCHES = (1, 4, 16)
"""Numbers of backward passes per update, in cases that measure the effect of cached casts."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its inputs, and the work that is timed.

    Attributes:
        name: The name in the table.
        build: Builds the model in float32 on the default device.
        inputs: The arguments of the model; floating-point tensors are float32.
        micro_batches: Number of backward passes per update of the weights; 0 for inference.
        has_low_inputs: True if floating-point inputs are results of an earlier low-precision call,
            such as a key-value cache. They are then stored in the low dtype.
        weight_bytes: Bytes of weights in a 16-bit dtype that a call must read, if reading them is
            most of its work; 0 otherwise.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    micro_batches: int = 0
    has_low_inputs: bool = False
    weight_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to run a model.

    Attributes:
        name: The name in the table.
        about: A description of one line.
        is_compiled: True if it is compiled, False if it is eager.
        is_autocast: True if it runs under ``torch.autocast``.
        is_stored_low: True if weights and inputs are stored in the low dtype.
        is_frozen: True if inductor treats weights as constants (inference only).
        is_amp_fx: True if amp_fx compiles it.
        options: Additional options of amp_fx, or of inductor for native contenders.
        is_for_inference: True if it only takes part in inference.
        is_for_training: True if it only takes part in training.
        package: The package that runs it, in a separate process, because importing the package
            affects other contenders; None for torch and amp_fx.
    """

    name: str
    about: str
    is_compiled: bool = False
    is_autocast: bool = False
    is_stored_low: bool = False
    is_frozen: bool = False
    is_amp_fx: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    is_for_inference: bool = False
    is_for_training: bool = False
    package: str | None = None

    @property
    def is_installed(self) -> bool:
        """Returns True if the package of the contender is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


_native = functools.partial(Contender, is_compiled=True, is_autocast=True)
_ours = functools.partial(Contender, is_compiled=True, is_amp_fx=True)
_low = functools.partial(Contender, is_compiled=True, is_stored_low=True)
_STRICT, _EAGER = (("numerics", "strict"),), (("numerics", "eager"),)
_ROUNDING = "native, with generated code that rounds as eager code does"
_FREEZING = "native, with inductor's freezing of weights, which sees no write to them"
_TUNING = (("max_autotune", True),)
_UNFOLDED = "amp_fx that folds no batch norms into convolutions"
_UNFROZEN = "amp_fx that packs no weights"
_CACHED = "amp_fx with casts of weights cached in training"
_LEAN = "amp_fx with the lean preset: a low residual stream, float32 gradients of weights"

CONTENDERS = (
    Contender(FLOAT32, "eager float32"),
    Contender("float32-compiled", "torch.compile in float32", is_compiled=True),
    Contender("autocast", "eager torch.autocast", is_autocast=True),
    _native(NATIVE, "torch.compile under torch.autocast"),
    _native(NATIVE_FROZEN, _FREEZING, is_frozen=True, is_for_inference=True),
    _native(
        NATIVE_TUNED,
        "native with freezing and max_autotune",
        is_frozen=True,
        options=_TUNING,
        is_for_inference=True,
    ),
    _ours(AMP_FX, 'torch.compile(backend="amp_fx")'),
    _ours(TUNED, "amp_fx with max_autotune", options=_TUNING, is_for_inference=True),
    _ours(
        "amp_fx-unfolded", _UNFOLDED, options=(("fold_batch_norm", False),), is_for_inference=True
    ),
    _ours(UNFROZEN, _UNFROZEN, options=(("freezing", False),), is_for_inference=True),
    _ours(CACHED, _CACHED, options=(("weight_cache", "training"),), is_for_training=True),
    _ours(UNCACHED, "amp_fx with weight_cache off", options=(("weight_cache", False),)),
    _ours(LEAN, _LEAN, options=(("policy", "lean"),), is_for_training=True),
    _native("native-strict", _ROUNDING, options=_STRICT),
    _ours("amp_fx-strict", "amp_fx, with the same", options=_STRICT),
    _ours("amp_fx-eager", "amp_fx with the bits of eager autocast", options=_EAGER),
    _low(LIMIT, "stored in the low dtype and compiled"),
    _low(LIMIT_FROZEN, "limit, with inductor's freezing", is_frozen=True, is_for_inference=True),
    _native(
        ZENTORCH,
        "AMD's backend of torch.compile, under torch.autocast, if installed",
        is_frozen=True,
        is_for_inference=True,
        package="zentorch",
    ),
    Contender(
        OPENVINO,
        "OpenVINO with a hint to compute in the low dtype, if installed",
        is_for_inference=True,
        package="openvino",
    ),
)
NAMES = tuple(contender.name for contender in CONTENDERS)
BY_NAME = dict(zip(NAMES, CONTENDERS, strict=True))


def contenders_of(workload: Workload, settings: Settings) -> list[Contender]:
    """Returns the contenders of a run.

    Contenders whose package is not installed take part only if they are named.
    """
    selected = [
        contender
        for contender in CONTENDERS
        if settings.takes_part(contender.name) and (settings.contenders or contender.is_installed)
    ]
    return [contender for contender in selected if _is_for(contender, workload, settings)]


def _is_for(contender: Contender, workload: Workload, settings: Settings) -> bool:
    """Returns True if a contender takes part in a workload; freezing requires inductor."""
    if workload.micro_batches:
        return not contender.is_for_inference
    has_freezing = settings.compiler == "inductor"
    return not contender.is_for_training and (has_freezing or not contender.is_for_inference)


def prepare(contender: Contender, workload: Workload, settings: Settings) -> Run:
    """Returns a function that runs one call, or one update of the weights. Its first call compiles.

    Each contender has its own copy of the weights: a kernel that reads a weight through a mutable
    pointer makes cached casts of the weight stale.
    """
    torch.manual_seed(SEED)
    with settings.device:
        model = workload.build()
    copy_forward(model, contender.name)
    model.train(workload.micro_batches > 0)
    if contender.is_stored_low:
        model.to(settings.dtype)
    has_low = workload.has_low_inputs and (contender.is_autocast or contender.is_amp_fx)
    is_low = contender.is_stored_low or has_low
    inputs = tuple(_stored(t, settings.dtype) if is_low else t for t in workload.inputs)
    call = compiled(contender, model, inputs, settings)
    region = functools.partial(region_of, contender, settings)

    def infer() -> object:
        with torch.no_grad(), region():
            return call(*inputs)

    if workload.micro_batches == 0:
        return infer
    # Fused for all contenders, because torch's default on the CPU is the slowest implementation.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def train() -> None:
        for _ in range(workload.micro_batches):
            with region():
                loss = call(*inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def compiling(contender: Contender) -> contextlib.AbstractContextManager[Any]:
    """Context manager for the first call of a contender, which compiles."""
    if not contender.is_frozen:
        return contextlib.nullcontext()
    from amp_fx.torch_private.inductor_config import config

    patch: contextlib.AbstractContextManager[Any] = config.patch(freezing=True)
    return patch


def copy_forward(model: nn.Module, name: str) -> None:
    """Replaces the ``forward`` of a model with a copy that has its own code object.

    Dynamo caches compiled code per code object, and would run code of one contender for another.
    """
    forward = type(model).forward
    code = forward.__code__.replace(co_name=f"forward_{name.replace('-', '_')}")
    copy = types.FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": copy})


def compiled(
    contender: Contender, model: nn.Module, inputs: tuple[torch.Tensor, ...], settings: Settings
) -> Callable[..., Any]:
    """Returns the compiled model of a contender, or the model itself for an eager contender."""
    if contender.name == OPENVINO:
        return with_openvino(model, inputs, settings)
    if not contender.is_compiled:
        return model
    if contender.package is not None:
        importlib.import_module(contender.package)
        return torch.compile(model, backend=contender.package)
    if not contender.is_amp_fx:
        parsed = Options.parse(dict(contender.options))
        inductor_options = {**numerics_config(parsed), **dict(parsed.inductor)} or None
        return torch.compile(model, backend=settings.compiler, options=inductor_options)
    options = {"dtype": settings.dtype, "compiler": settings.compiler, **dict(contender.options)}
    return torch.compile(model, backend="amp_fx", options=options)


def with_openvino(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], settings: Settings
) -> Callable[..., torch.Tensor]:
    """Returns a model that OpenVINO converted and compiled for latency."""
    openvino = importlib.import_module("openvino")
    with torch.no_grad():
        converted = openvino.convert_model(model, example_input=inputs)
    config = {
        "INFERENCE_PRECISION_HINT": "bf16" if settings.dtype is torch.bfloat16 else "f16",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    request = openvino.Core().compile_model(converted, "CPU", config).create_infer_request()
    arrays = [tensor.numpy() for tensor in inputs]
    return lambda *_: torch.from_numpy(request.infer(arrays, share_outputs=True)[0])


def region_of(contender: Contender, settings: Settings) -> contextlib.AbstractContextManager[Any]:
    """Returns a new context manager for each call of a contender."""
    if not contender.is_autocast:
        return contextlib.nullcontext()
    return torch.autocast(settings.device.type, settings.dtype)


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
