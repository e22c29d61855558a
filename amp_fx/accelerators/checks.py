"""The checks of ``amp_fx.conformance``, in order."""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_fx.accelerators.lists import check_lists, check_other_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.accelerators.target import Comparison, Target

FLOAT32 = torch.float32
_FALLTHROUGH = (
    "register a fallthrough for ops without a policy: TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m)"
    " { m.fallback(torch::CppFunction::makeFallthrough()); }"
)
_STATE = "let torch.autocast alone hold the state: kernels and hooks must not change it"


def check_fallthrough(target: Target) -> Iterator[Comparison]:
    """Calls ops without a policy: they run in the dtypes of their inputs."""
    x, low = _square(target), _square(target, target.dtype)
    for name, call in (("aten::relu", torch.relu), ("aten::add.Tensor", lambda t: t + t)):
        for tensor in (x, low):
            result = functools.partial(_dtype_in_region, target, functools.partial(call, tensor))
            yield target.compare(name, tensor.dtype, result, _FALLTHROUGH)


def _dtype_in_region(target: Target, call: Callable[[], torch.Tensor]) -> torch.dtype:
    with target.region():
        return call().dtype


def check_regions(target: Target) -> Iterator[Comparison]:
    """Nests regions, and disables them: each applies to the ops inside it."""
    x = _square(target)

    def dtypes() -> list[torch.dtype]:
        found = [x.mm(x).dtype]
        with target.region():
            found.append(x.mm(x).dtype)
            with target.region(enabled=False):
                found.append(x.mm(x).dtype)
                with target.region():
                    found.append(x.mm(x).dtype)
            for dtype in target.other_dtypes:
                with target.region(dtype=dtype):
                    found.append(x.mm(x).dtype)
            found.append(x.mm(x).dtype)
        return [*found, x.mm(x).dtype]

    low, *others = map(target.product_dtype, (target.dtype, *target.other_dtypes))
    expected = [FLOAT32, low, FLOAT32, low, *others, low, FLOAT32]
    yield target.compare("aten::mm in nested regions", expected, dtypes, _STATE)

    def state_after_error() -> bool:
        try:
            with target.region():
                raise KeyError
        except KeyError:
            return torch.is_autocast_enabled(target.device_type)

    yield target.compare("a region after an exception", False, state_after_error, _STATE)


def check_untouched_calls(target: Target) -> Iterator[Comparison]:
    """Calls ops in place, with ``out=`` and on other tensors: autocast leaves them alone."""
    x, low = _square(target), _square(target, target.dtype)
    others = x.to("meta" if target.device_type == "cpu" else "cpu")
    calls: tuple[tuple[str, torch.dtype, Callable[[], torch.Tensor]], ...] = (
        ("torch.mm with out=", FLOAT32, lambda: torch.mm(x, x, out=torch.empty_like(x))),
        ("aten::exp_", low.dtype, lambda: low.clone().exp_()),
        ("aten::addmm_", FLOAT32, lambda: x.clone().addmm_(x, x)),
        ("aten::mm on another device", FLOAT32, lambda: others.mm(others)),
    )
    mend = "register kernels of functional overloads of this device alone"
    for name, expected, call in calls:
        result = functools.partial(_dtype_in_region, target, call)
        yield target.compare(name, expected, result, mend)


class _RecordingProduct(torch.autograd.Function):
    """A product that records the dtypes that it gets, and autocast's state."""

    device_type = ""
    seen: list[object] = []  # noqa: RUF012, a forward is static

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        is_on = torch.is_autocast_enabled(_RecordingProduct.device_type)
        _RecordingProduct.seen.extend((x.dtype, is_on))
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        _RecordingProduct.seen.append(torch.is_autocast_enabled(_RecordingProduct.device_type))
        return grad.to(x.dtype) @ y.t(), x.t() @ grad.to(x.dtype)


def check_custom_functions(target: Target) -> Iterator[Comparison]:
    """Calls ``torch.amp.custom_fwd`` and ``custom_bwd``: both get the state of the forward."""
    for cast_inputs, is_on in ((None, True), (torch.float32, False)):
        seen = functools.partial(_seen_by_custom_function, target, cast_inputs)
        name = f"custom_fwd(cast_inputs={cast_inputs})"
        yield target.compare(name, [FLOAT32, is_on, is_on], seen, _STATE)


def _seen_by_custom_function(target: Target, cast_inputs: torch.dtype | None) -> list[object]:
    amp: Any = torch.amp
    custom_fwd = amp.custom_fwd(device_type=target.device_type, cast_inputs=cast_inputs)
    custom_bwd = amp.custom_bwd(device_type=target.device_type)
    members = {
        "forward": staticmethod(custom_fwd(_RecordingProduct.forward)),
        "backward": staticmethod(custom_bwd(_RecordingProduct.backward)),
    }
    decorated: Any = type("_Decorated", (_RecordingProduct,), members)
    _RecordingProduct.device_type = target.device_type
    _RecordingProduct.seen.clear()
    x = _square(target).requires_grad_()
    with target.region():
        out = decorated.apply(x, x)
    out.sum().backward()
    return list(_RecordingProduct.seen)


def check_checkpoints(target: Target) -> Iterator[Comparison]:
    """Recomputes a checkpoint outside of the region: it has the region's state and dtype."""
    mend = (
        f"torch.{target.device_type} needs device(), get_rng_state() and set_rng_state(); {_STATE}"
    )
    for use_reentrant in (True, False):
        seen = functools.partial(_seen_by_checkpoint, target, use_reentrant)
        expected = [True, target.product_dtype(target.dtype)] * 2
        yield target.compare(f"checkpoint(use_reentrant={use_reentrant})", expected, seen, mend)


def _seen_by_checkpoint(target: Target, use_reentrant: bool) -> list[object]:
    seen: list[object] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        out = x.mm(x)
        seen.extend((torch.is_autocast_enabled(target.device_type), out.dtype))
        return out.mm(out)  # a recomputation ends in the last op that saves tensors

    x = _square(target).requires_grad_()
    with target.region():
        out: Any = checkpoint(product, x, use_reentrant=use_reentrant)
    out.float().sum().backward()
    return seen


def check_gradients(target: Target) -> Iterator[Comparison]:
    """Trains a small network: weights get float32 gradients near those of the CPU in float32."""
    mend = "compare the backward kernels of linear, layer_norm, gelu and cross_entropy"
    result = functools.partial(_compare_gradients, target)
    yield target.compare("a step of training", "gradients of the CPU", result, mend)


def _compare_gradients(target: Target) -> str:
    generator = torch.Generator().manual_seed(0)
    exact = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    with torch.no_grad():
        for param in exact.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 3)
    x = torch.randn(8, 8, generator=generator)
    y = torch.arange(8) % 4
    with target.region():
        grads = _gradients(copy.deepcopy(exact).to(target.device_type), *target.tensors((x, y)))
    for grad, exact_grad in zip(grads, _gradients(exact, x, y), strict=True):
        if grad.dtype is not FLOAT32:
            return f"a gradient in {grad.dtype}"
        error = (grad.cpu() - exact_grad).abs().max() / exact_grad.abs().max()
        if not error <= 0.05:
            return f"a gradient with an error of {error:.0%}"
    return "gradients of the CPU"


def _gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = nn.functional.cross_entropy(model(x), y)
    return torch.autograd.grad(loss, [*model.parameters()])


def check_scaler(target: Target) -> Iterator[Comparison]:
    """Steps a ``torch.amp.GradScaler``: it unscales gradients, and skips those that overflow."""
    unscale = "mend the kernel of aten::_amp_foreach_non_finite_check_and_unscale_"
    update = "mend the kernel of aten::_amp_update_scale_"
    devices = {"": (target.device_type,) * 2, ", also on the CPU": (target.device_type, "cpu")}
    for suffix, places in devices.items():
        steps: tuple[tuple[str, float, str, str], ...] = (
            (f"finite gradients{suffix}", 1.0, "0.0, scale 16.0", update),
            (f"inf in a gradient{suffix}", math.inf, "1.0, scale 4.0", unscale),
            (f"-inf in a gradient{suffix}", -math.inf, "1.0, scale 4.0", unscale),
            (f"nan in a gradient{suffix}", math.nan, "1.0, scale 4.0", unscale),
        )
        for name, factor, expected, advice in steps:
            stepped = functools.partial(_stepped_at_each, target, places, factor)
            yield target.compare(f"GradScaler: {name}", expected, stepped, advice)


def _stepped_at_each(target: Target, places: tuple[str, ...], factor: float) -> str:
    """Returns the results of ``_stepped`` for each parameter that may be at fault."""
    results = [_stepped(target, places, factor, index) for index in range(len(places))]
    return " or ".join(dict.fromkeys(results))


def _stepped(target: Target, places: tuple[str, ...], factor: float, at_fault: int) -> str:
    """Returns the parameters after a step from 1 with gradients of 1, and the scale after 8.

    Args:
        target: The device.
        places: The device of each parameter.
        factor: The last gradient of one parameter.
        at_fault: The index of that parameter.
    """
    scaler_type: Any = torch.amp.GradScaler
    scaler = scaler_type(target.device_type, init_scale=8.0, growth_interval=1)
    params = [nn.Parameter(torch.ones(5).to(place)) for place in places]
    optimizer = torch.optim.SGD(params, lr=1.0, foreach=False)
    factors = [torch.ones(5) for _ in places]
    factors[at_fault][-1] = factor
    losses = [
        (param * other.to(param.device)).sum() for param, other in zip(params, factors, strict=True)
    ]
    for loss in losses:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    values = {value for param in params for value in param.detach().cpu().tolist()}
    return f"{', '.join(map(str, sorted(values)))}, scale {scaler.get_scale()}"


def _square(target: Target, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    """Returns a matrix on the device."""
    moved: torch.Tensor = target.tensors(torch.eye(4, dtype=dtype))
    return moved


Check: TypeAlias = "Callable[[Target], Iterator[Comparison]]"

CHECKS: dict[str, Check] = {
    "fallthrough": check_fallthrough,
    "lists": check_lists,
    "other kernels": check_other_kernels,
    "regions": check_regions,
    "untouched calls": check_untouched_calls,
    "custom functions": check_custom_functions,
    "checkpoints": check_checkpoints,
    "gradients": check_gradients,
    "scaler": check_scaler,
}
"""The checks by name, in order."""
