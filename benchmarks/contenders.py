"""The contenders of the benchmark: ways to run a float32 model, with and without amp_fx."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import types
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config as inductor_config

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Run = Callable[[], object]
    "Runs one unit of work. Inference returns the result of the model."

FLOAT32, NATIVE, AMP_FX, LIMIT, LEAN = "float32", "native", "amp_fx", "limit", "amp_fx-lean"
NATIVE_FROZEN, LIMIT_FROZEN = "native-freezing", "limit-freezing"
AMP_FX_REGION, AMP_FX_COMPILE = "amp_fx-region", "amp_fx-compile"
ZENTORCH, OPENVINO = "zentorch", "openvino"
SEED = 0
LEARNING_RATE = 1e-5


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        device: The device on which models run.
        dtype: The low dtype.
        compiler: The inner compiler: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
        contenders: Names of contenders; empty for all that are installed.
        repeats: Number of rounds. Each contender runs one timed block per round.
    """

    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"
    contenders: tuple[str, ...] = ()
    repeats: int = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its inputs, and the work that is timed.

    Attributes:
        name: The title of the table.
        build: Builds the model in float32 on the default device.
        inputs: The arguments of the model; floating-point tensors are float32.
        micro_batches: Number of backward passes per update of the weights; 0 for inference.
        has_low_inputs: True if floating-point inputs are results of an earlier low-precision call,
            such as a key-value cache. They are then stored in the low dtype.
        compares_calls: True if other ways to call amp_fx take part.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    micro_batches: int = 0
    has_low_inputs: bool = False
    compares_calls: bool = False


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to run a model.

    Attributes:
        name: The name in the table.
        about: A description of one line.
        backend: The backend of ``torch.compile``; ``"native"`` stands for ``Settings.compiler``,
            None for a model that is not compiled.
        is_autocast: True if it runs under ``torch.autocast``.
        is_stored_low: True if weights and inputs are stored in the low dtype.
        is_frozen: True if inductor treats weights as constants (inference only).
        options: Options of the backend.
        only: ``"inference"``, ``"training"`` or ``"calls"`` if it takes part in that alone.
        package: The package that runs it, in a separate process, because importing the package
            affects other contenders; None for torch and amp_fx.
    """

    name: str
    about: str
    backend: str | None = None
    is_autocast: bool = False
    is_stored_low: bool = False
    is_frozen: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    only: str | None = None
    package: str | None = None


_native = functools.partial(Contender, backend=NATIVE, is_autocast=True)
_ours = functools.partial(Contender, backend=AMP_FX)
_low = functools.partial(Contender, backend=NATIVE, is_stored_low=True)
_frozen = functools.partial(_native, is_frozen=True, only="inference")
_STRICT, _TUNED = (("emulate_precision_casts", True),), (("max_autotune", True),)
_CACHED, _UNPACKED = (("weight_cache", "training"),), (("freezing", False),)

CONTENDERS = (
    Contender(FLOAT32, "eager float32"),
    Contender("float32-compiled", "torch.compile in float32", NATIVE),
    Contender("autocast", "eager torch.autocast", is_autocast=True),
    _native(NATIVE, "torch.compile under torch.autocast"),
    _frozen(NATIVE_FROZEN, "native with inductor's freezing, which sees no write to weights"),
    _frozen("native-autotune", "native with freezing and max_autotune", options=_TUNED),
    _native("native-strict", "native that rounds as eager code does", options=_STRICT),
    _ours(AMP_FX, 'torch.compile(backend="amp_fx")'),
    _ours(AMP_FX_REGION, "amp_fx under torch.autocast", is_autocast=True, only="calls"),
    _ours(AMP_FX_COMPILE, "amp_fx.compile(model)", only="calls"),
    _ours("amp_fx-autotune", "amp_fx with max_autotune", options=_TUNED, only="inference"),
    _ours("amp_fx-unpacked", "casts cached, not packed", options=_UNPACKED, only="inference"),
    _ours("amp_fx-cached", "casts cached in training", options=_CACHED, only="training"),
    _ours("amp_fx-uncached", "amp_fx with weight_cache off", options=(("weight_cache", False),)),
    _ours(LEAN, "amp_fx with the lean preset", options=(("policy", "lean"),), only="training"),
    _ours("amp_fx-strict", "amp_fx that rounds as eager code", options=(("numerics", "strict"),)),
    _ours("amp_fx-eager", "amp_fx with eager code's bits", options=(("numerics", "eager"),)),
    _low(LIMIT, "stored in the low dtype and compiled"),
    _low(LIMIT_FROZEN, "limit, with inductor's freezing", is_frozen=True, only="inference"),
    _frozen(ZENTORCH, "AMD's backend, if installed", backend=ZENTORCH, package=ZENTORCH),
    Contender(OPENVINO, "OpenVINO, if installed", only="inference", package=OPENVINO),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}


def contenders_of(workload: Workload, settings: Settings) -> list[Contender]:
    """Returns the contenders of a workload.

    Contenders whose package is not installed take part only if they are named. Contenders for
    inference alone require inductor or a package.
    """
    excluded = {"inference" if workload.micro_batches else "training"}
    if not workload.compares_calls:
        excluded.add("calls")
    if settings.compiler != "inductor":
        excluded.add("inference")
    return [
        contender
        for name, contender in BY_NAME.items()
        if contender.only not in excluded
        and (name in settings.contenders if settings.contenders else _is_installed(contender))
    ]


def _is_installed(contender: Contender) -> bool:
    return contender.package is None or importlib.util.find_spec(contender.package) is not None


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
    has_low = workload.has_low_inputs and (contender.is_autocast or contender.backend == AMP_FX)
    is_low = contender.is_stored_low or has_low
    inputs = tuple(
        t.to(settings.dtype) if is_low and t.is_floating_point() else t for t in workload.inputs
    )
    call = compiled(contender, model, inputs, settings)

    def infer() -> object:
        with torch.no_grad(), region_of(contender, settings):
            return call(*inputs)

    if workload.micro_batches == 0:
        return infer
    # Fused for all contenders, because torch's default on the CPU is the slowest implementation.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def train() -> None:
        for _ in range(workload.micro_batches):
            with region_of(contender, settings):
                loss = call(*inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def compiling(contender: Contender) -> contextlib.AbstractContextManager[Any]:
    """Context manager for the first call of a contender, which compiles."""
    patch: contextlib.AbstractContextManager[Any] = inductor_config.patch(
        freezing=contender.is_frozen
    )
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
        return _with_openvino(model, inputs, settings)
    if contender.backend is None:
        return model
    if contender.package is not None:
        importlib.import_module(contender.package)
    if contender.name == AMP_FX_COMPILE:
        return amp_fx.compile(model, dtype=settings.dtype, options={"compiler": settings.compiler})
    options = dict(contender.options)
    if contender.backend == AMP_FX:
        options = {"dtype": settings.dtype, "compiler": settings.compiler, **options}
    backend = settings.compiler if contender.backend == NATIVE else contender.backend
    return torch.compile(model, backend=backend, options=options or None)


def _with_openvino(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], settings: Settings
) -> Callable[..., torch.Tensor]:
    """Returns a model that OpenVINO converted and compiled for latency, in the low dtype."""
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
