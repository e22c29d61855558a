"""Repairs Triton's interpreter, so that it rounds, reduces and calls libdevice as a GPU does.

Triton runs kernels in NumPy if ``TRITON_INTERPRET=1`` when it is imported. One function repairs
each difference from a GPU. ``tests/cuda/test_interpreter.py`` checks rounding;
``tests/cuda/test_generated.py`` checks the others by the kernels that it executes:

- float32 is rounded to bfloat16 or float16 to the nearest, ties to even;
- reductions and scans call custom combine functions with whole arrays;
- ``libdevice`` has functions, computed by NumPy or torch in float64;
- kernels access the tensors' memory; the interpreter passes copies and writes all of them back;
- threads run kernels one after another, because the interpreter replaces functions meanwhile.

Sums are added in NumPy's order by the host's arithmetic, so a GPU may differ in the last bit.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as module

from tests.cuda.memory import CAPTURES, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, Any]

FLOATS: dict[Any, torch.dtype] = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_AS_BITS = {tl.bfloat16: torch.uint16, tl.float8e4nv: torch.uint8, tl.float8e5: torch.uint8}
"""Types that NumPy lacks -> as what the interpreter holds them."""


@functools.cache
def repair() -> None:
    """Repairs the interpreter, for the rest of the process."""
    repair_rounding()
    repair_reductions()
    repair_libdevice()
    repair_arguments()
    repair_threads()


def convert(data: Array, source: Any, target: Any) -> Array:
    """Floats of one type as another, rounded to the nearest, ties to even."""
    given = torch.from_numpy(np.ascontiguousarray(data)).view(FLOATS[source])
    found = given.to(FLOATS[target])
    if target in _AS_BITS:
        found = found.view(_AS_BITS[target])
    return found.numpy().reshape(data.shape)


def repair_rounding() -> None:
    """Replaces the interpreter's casts, which cut float32 off.

    Relies on ``_convert_float`` and on ``InterpreterBuilder.cast_impl`` and the ``create_*`` that
    call it.
    """
    builder = module.InterpreterBuilder
    original = builder.cast_impl
    convert_original = module._convert_float

    def convert_float(data: Array, source: Any, target: Any, mode: Any) -> Array:
        is_known = source in FLOATS and target in FLOATS
        toward_zero = module._ir.ROUNDING_MODE.RTZ
        if not is_known or mode == toward_zero:
            return convert_original(data, source, target, mode)  # type: ignore[no-any-return]
        return convert(data, source, target)

    def cast(self: Any, handle: Any, target: Any) -> Any:
        source, kind = handle.dtype.scalar, target.scalar
        if source in FLOATS and kind in FLOATS:
            return module.TensorHandle(convert(handle.data, source, kind), kind)
        if source is tl.bfloat16 or source == tl.bfloat16:
            wide = module.TensorHandle(convert(handle.data, source, tl.float32), tl.float32)
            return original(self, wide, target)
        if kind == tl.bfloat16:
            wide = handle.data.astype(np.float32)
            return module.TensorHandle(convert(wide, tl.float32, kind), kind)
        return original(self, handle, target)

    module._convert_float = convert_float
    builder.cast_impl = cast


def repair_reductions() -> None:
    """Replaces reductions and scans that go element by element.

    Relies on ``ReduceOps.generic_reduce`` and ``ScanOps.generic_scan``.
    """
    module.ReduceOps.generic_reduce = _reduce
    module.ScanOps.generic_scan = _scan


def _combine(ops: Any, dtypes: Sequence[Any], left: list[Array], right: list[Array]) -> list[Array]:
    """Applies the combine function to two sets of arrays."""
    sides = [
        ops.to_tensor(np.ascontiguousarray(data), dtype.scalar)
        for side in (left, right)
        for data, dtype in zip(side, dtypes, strict=True)
    ]
    found = ops.combine_fn.fn(*sides)
    is_one = isinstance(found, tl.core.tensor)
    results = [found] if is_one else list(found)
    pairs = zip(results, left, strict=True)
    return [np.asarray(r.handle.data).reshape(data.shape) for r, data in pairs]


def _reduce(self: Any, given: Any) -> list[Any]:
    """Reduces by halves: each combines the first half of what is left with the second."""
    has_axis = self.axis is not None
    num_axes = given[0].handle.data.ndim
    given, axis = self.unravel(given, self.axis)
    dtypes = [each.dtype for each in given]
    arrays = [np.moveaxis(each.handle.data, axis, 0) for each in given]
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        firsts, seconds = ([a[i * half : (i + 1) * half] for a in arrays] for i in (0, 1))
        combined = _combine(self, dtypes, firsts, seconds)
        rest = [a[2 * half :] for a in arrays]
        arrays = [np.concatenate(pair) for pair in zip(combined, rest, strict=True)]
    results = []
    for data, dtype in zip((a[0] for a in arrays), dtypes, strict=True):
        if self.keep_dims:
            shaped = np.expand_dims(data, axis) if has_axis else data.reshape((1,) * num_axes)
        else:
            shaped = data if has_axis else data.item()
        results.append(self.to_tensor(shaped, dtype.scalar))
    return results


def _scan(self: Any, given: Any) -> list[Any]:
    """Scans by doubling: each step combines elements at a distance of 1, 2, 4, ..."""
    dtypes = [each.dtype for each in given]
    arrays = [np.moveaxis(each.handle.data, self.axis, 0).copy() for each in given]
    distance = 1
    while distance < len(arrays[0]):
        # Blocks have a power of two of places: what comes round from the end is thrown away.
        back = [np.roll(a, distance, 0) for a in arrays]
        pairs = zip(arrays, _combine(self, dtypes, back, arrays), strict=True)
        arrays = [np.concatenate([a[:distance], new[distance:]]) for a, new in pairs]
        distance *= 2
    moved = [np.ascontiguousarray(np.moveaxis(a, 0, self.axis)) for a in arrays]
    return [self.to_tensor(a, d.scalar) for a, d in zip(moved, dtypes, strict=True)]


LIBDEVICE: dict[str, Callable[..., torch.Tensor]] = {
    "div_rn": torch.div,
    "fabs": torch.abs,
    "fast_tanhf": torch.tanh,
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "mul_rn": torch.mul,
    "nearbyint": torch.round,
    "rint": torch.round,
}
"""Functions of libdevice that have another name in torch."""


class _Libdevice:
    """In the place of libdevice: computed in float64, and rounded to their type at the end."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _on_arrays(LIBDEVICE.get(name) or getattr(torch, name))


def repair_libdevice() -> None:
    """Gives kernels that inductor writes a ``libdevice``.

    Relies on kernels taking it from ``torch._inductor.runtime.triton_helpers``.
    """
    from torch._inductor.runtime import triton_compat, triton_helpers

    helpers: Any = triton_helpers
    library: Any = _Libdevice()
    triton_compat.libdevice = library
    helpers.libdevice = library


def _on_arrays(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(*args: Any, **_: Any) -> Any:
        handles = [arg.handle if isinstance(arg, tl.core.tensor) else None for arg in args]
        kind = next(handle.dtype.scalar for handle in handles if handle is not None)
        found = function(*map(_as_float64, args))
        if found.dtype == torch.bool:
            return _tensor_of(found.numpy(), tl.int1)
        if kind not in FLOATS:
            kind = tl.float32
        return _tensor_of(convert(found.numpy(), tl.float64, kind), kind)

    return call


def _as_float64(arg: Any) -> torch.Tensor:
    if not isinstance(arg, tl.core.tensor):
        return torch.tensor(float(getattr(arg, "value", arg)), dtype=torch.float64)
    handle = arg.handle
    kind = handle.dtype.scalar
    if kind in FLOATS:
        return torch.from_numpy(convert(handle.data, kind, tl.float64))
    return torch.from_numpy(handle.data.astype(np.float64))


def _tensor_of(data: Array, kind: Any) -> Any:
    type_ = tl.block_type(kind, list(data.shape)) if data.shape else kind
    return tl.core.tensor(module.TensorHandle(data, kind), type_)


def repair_arguments() -> None:
    """Hands kernels the tensors' own memory.

    As Triton's launcher does, it asks every tensor for a pointer to write through. Relies on
    ``GridExecutor._init_args_hst`` and ``_restore_args_dev``.
    """

    def init(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
        return [_seen(arg) for arg in args], {name: _seen(arg) for name, arg in kwargs.items()}

    def restore(self: Any, *args: Any) -> None:
        """It is written already."""

    module.GridExecutor._init_args_hst = init
    module.GridExecutor._restore_args_dev = restore


def repair_threads() -> None:
    """Runs kernels of one thread at a time, and records them in the captures.

    Relies on ``GridExecutor.__call__``.
    """
    run, lock = module.GridExecutor.__call__, threading.RLock()

    @functools.wraps(run)
    def run_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            run(self, *args, **kwargs)
        for graph in CAPTURES:
            graph.note(run, (self, *args), kwargs, None)

    module.GridExecutor.__call__ = run_alone


def _seen(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg.device.type == "cuda":
        arg.data_ptr()
        return on_host(arg)
    return arg
