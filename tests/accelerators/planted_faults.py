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


def no_fault() -> None:
    """The sound device."""


def wrong_entry() -> None:
    """aten::softmax is in the low dtype."""
    implement("softmax.int", casting(aten.softmax.int, to_low), AUTOCAST)


def missing_entry() -> None:
    """aten::mm is not in the lists."""
    implement("mm", torch.library.fallthrough_kernel, AUTOCAST)


def missing_composite_entry() -> None:
    """aten::linear is not in the lists, but addmm and mm are, which it calls."""
    implement("linear", torch.library.fallthrough_kernel, AUTOCAST)


def additional_entry() -> None:
    """aten::gelu is in the lists."""
    implement("gelu", casting(aten.gelu.default, lambda tensor: tensor.float()), AUTOCAST)


def cast_of_float64() -> None:
    """aten::bmm casts float64."""
    implement("bmm", casting(aten.bmm.default, to_low_if_float), AUTOCAST)


def cast_of_integers() -> None:
    """aten::mm casts integers."""
    implement("mm", casting(aten.mm.default, lambda t: t if is_float64(t) else to_low(t)), AUTOCAST)


def narrow_promotion() -> None:
    """aten::addcmul casts to the low dtype if any of its inputs has it."""

    def kernel(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        low = torch.get_autocast_dtype(DEVICE)
        is_low = any(tensor.dtype is low for tensor in args)
        with without(AUTOCAST):
            return aten.addcmul(*(map(to_low, args) if is_low else args), **kwargs)  # type: ignore[no-any-return]

    implement("addcmul", kernel, AUTOCAST)


def one_dtype_for_all_regions() -> None:
    """aten::mv is in bfloat16 in regions of float16, too."""
    implement(
        "mv", casting(aten.mv.default, lambda t: t.bfloat16() if is_eligible(t) else t), AUTOCAST
    )


def ignored_dtype_argument() -> None:
    """aten::cumsum returns float32 although another dtype is requested."""

    def kernel(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        with without(AUTOCAST):
            return torch.cumsum(x, dim, dtype=torch.float32 if is_eligible(x) else dtype)

    implement("cumsum", kernel, AUTOCAST)


def cast_of_out() -> None:
    """aten::mm with out= casts its inputs, so that they do not match the output any more."""
    implement("mm.out", casting(aten.mm.out, to_low), AUTOCAST)


def no_ban() -> None:
    """binary_cross_entropy runs in regions."""
    implement("binary_cross_entropy", torch.library.fallthrough_kernel, AUTOCAST)


def no_fallthrough() -> None:
    """Ops without a policy have no kernel in regions."""
    vars(autocast_kernels)["has_backend_fallback"] = lambda _: True


def lost_state() -> None:
    """aten::mm disables autocast, and does not enable it again."""

    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with without(AUTOCAST):
            result = aten.mm(*(to_low(t) if is_eligible(t) else t for t in (x, y)))
        torch.set_autocast_enabled(DEVICE, False)
        return result  # type: ignore[no-any-return]

    implement("mm", kernel, AUTOCAST)


def missing_kernel() -> None:
    """layer_norm has no kernel."""

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("native_layer_norm is not implemented for my_device")

    implement("native_layer_norm", kernel, KERNEL)


def missing_low_kernel() -> None:
    """aten::mv has a kernel for float32 alone."""

    def kernel(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        if matrix.dtype in LOW:
            raise NotImplementedError(f"mv is not implemented for {matrix.dtype}")
        return on_cpu(aten.mv, matrix, vector)  # type: ignore[no-any-return]

    implement("mv", kernel, KERNEL)


def inexact_kernel() -> None:
    """aten::exp rounds to bfloat16 inside."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return on_cpu(aten.exp, x).bfloat16().to(x.dtype)  # type: ignore[no-any-return]

    implement("exp", kernel, KERNEL)


def wrong_backward() -> None:
    """The backward of gelu returns zeros."""
    implement("gelu_backward", lambda grad, *_, **__: torch.zeros_like(grad), KERNEL)


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


def missed_infinity() -> None:
    """The check of gradients misses negative infinity."""
    implement(
        "_amp_foreach_non_finite_check_and_unscale_",
        functools.partial(_check_and_unscale, lambda grad: grad.isnan() | grad.isposinf()),
        KERNEL,
    )


def missed_nan() -> None:
    """The check of gradients compares with infinity, which NaN does not equal."""
    implement(
        "_amp_foreach_non_finite_check_and_unscale_",
        functools.partial(_check_and_unscale, lambda grad: grad.abs() == torch.inf),
        KERNEL,
    )


def scale_without_backoff() -> None:
    """The scale does not shrink after an overflow."""
    implement("_amp_update_scale_", lambda scale, *_: scale, KERNEL)


def module_without_random_state() -> None:
    """``torch.my_device`` lacks a function that checkpoints call."""
    del torch.my_device.get_rng_state  # type: ignore[attr-defined]


Fault = Callable[[], None]

FAULTS: dict[Fault, tuple[str, ...]] = {
    no_fault: (),
    wrong_entry: ("aten::softmax.int",),
    missing_entry: ("aten::mm (float32)",),
    missing_composite_entry: ("aten::linear",),
    additional_entry: ("aten::gelu",),
    cast_of_float64: ("aten::bmm (float64)",),
    cast_of_integers: ("aten::mm (int64)",),
    narrow_promotion: ("aten::addcmul",),
    one_dtype_for_all_regions: ("aten::mv (float32)",),
    ignored_dtype_argument: ("aten::cumsum (dtype=)",),
    cast_of_out: ("torch.mm with out=",),
    no_ban: ("aten::binary_cross_entropy",),
    no_fallthrough: ("aten::relu", "aten::add.Tensor"),
    lost_state: ("aten::mm in nested regions",),
    missing_kernel: ("aten::layer_norm",),
    missing_low_kernel: ("aten::mv",),
    inexact_kernel: ("aten::exp",),
    wrong_backward: ("a step of training",),
    missed_infinity: ("GradScaler: -inf",),
    missed_nan: ("GradScaler: nan",),
    scale_without_backoff: ("GradScaler: inf",),
    module_without_random_state: ("checkpoint(use_reentrant=True)",),
}
"""Beginnings of results that report each fault."""

DEVICES: dict[str, tuple[Fault, ...]] = {
    "sound": (no_fault,),
    "lists": (
        wrong_entry,
        missing_composite_entry,
        additional_entry,
        cast_of_float64,
        cast_of_integers,
        narrow_promotion,
        one_dtype_for_all_regions,
        ignored_dtype_argument,
        cast_of_out,
        no_ban,
        inexact_kernel,
        missed_infinity,
        module_without_random_state,
    ),
    "kernels": (missing_entry, missing_kernel, missing_low_kernel, missed_nan),
    "fallthrough": (no_fallthrough,),
    "state": (lost_state,),
    "backward": (wrong_backward, scale_without_backoff),
}
"""Devices with faults of which none hides another, or is reported by the same result."""


def find(faults: tuple[Fault, ...]) -> None:
    """Checks a device with faults."""
    for fault in faults:
        fault()
    amp_fx.register_device(DEVICE, dtypes=LOW)
    report = amp_fx.conformance(DEVICE)
    failed = [result.op for result in report.failures]
    reported = [op for fault in faults for op in FAULTS[fault]]
    assert report.passed is (not reported), report
    missing = [op for op in reported if not any(name.startswith(op) for name in failed)]
    assert not missing, report
    sys.stdout.write(f"{len(faults)} faults: {sorted(set(failed))}\n")


PROGRAMS = {name: functools.partial(find, faults) for name, faults in DEVICES.items()}
