"""Checks the ops of autocast's lists, one by one."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.accelerators.samples import sample_arguments
from amp_fx.dtypes import dtype_name
from amp_fx.policies.calls import qualified_name, restore_results
from amp_fx.policies.decide import Decision
from amp_fx.regions.autocast_kernels import autocast_key, find_op
from amp_fx.tables import OWN_KERNELS
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.torch_private.modes import TorchDispatchMode
from amp_fx.torch_private.ops import ops_with_kernel_for
from amp_fx.torch_private.pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.accelerators.target import Comparison, Target
    from amp_fx.policies.calls import Call
    from amp_fx.torch_private.ops import OpOverload

TOLERANCES = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 1e-5}
"""Largest difference from the CPU, relative to the largest number: four units in the last place of
a low dtype, and room for another order of sums in float32. Other dtypes have float32's."""


@dataclasses.dataclass
class Run:
    """Result of one call.

    Attributes:
        kernels: The kernels that the call reached, with the dtypes of their tensors. Casts are
            omitted.
        result: The result, or None.
        error: The exception, if one was raised.
    """

    kernels: list[str]
    result: Any = None
    error: Exception | None = None


class _KernelRecorder(TorchDispatchMode):
    """Records the calls that reach kernels, after autocast and autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return func(*args, **kwargs or {})
        position = len(self.kernels)
        self.kernels.append(f"{func}({_dtypes((args, kwargs))})")
        result = func(*args, **kwargs or {})
        self.kernels[position] += f" -> {_dtypes(result)}"
        return result


aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.detach.default, aten.alias.default)


def _dtypes(tree: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return ", ".join(dtype_name(tensor.dtype) for tensor in tensors)


def _record(function: Callable[[], Any]) -> Run:
    run = Run([])

    def call() -> None:
        with torch.no_grad(), _KernelRecorder() as recorder:
            run.kernels = recorder.kernels
            try:
                run.result = function()
            except Exception as error:  # noqa: BLE001, the caller reports it
                run.error = error

    _InPythonFunction.apply(call)  # type: ignore[no-untyped-call]
    return run


class _InPythonFunction(torch.autograd.Function):
    """Calls a function. Its warnings in C++ become Python's, which the report ignores.

    ``torch.ops`` writes them to stderr, for example that ``chain_matmul`` is deprecated. Each
    function of torch's Python API collects the warnings of the calls inside of it.
    """

    @staticmethod
    def forward(_: Any, function: Callable[[], None]) -> None:
        function()


def check_lists(target: Target) -> Iterator[Comparison]:
    """Compares autocast with casts by hand, and results with the CPU's, for each op.

    An op whose casts are made by hand, outside of a region, must reach the same kernels with the
    same dtypes as in a region. The device's own autocast kernels may call any op.
    """
    for name, policy in target.table.items():
        op = find_op(name)
        if op is None:  # of another torch
            continue
        yield _first_failure(target, op, policy)


def check_other_kernels(target: Target) -> Iterator[Comparison]:
    """Compares ops that have an autocast kernel, but no policy, with calls outside of a region.

    Only ops of ``aten`` are compared. Libraries register kernels for ops of their own, such as
    torchvision for ``torchvision::nms``, and no list says what those shall do.
    """
    expected = {*target.table, *OWN_KERNELS.get(target.device_type, ())}
    for name in ops_with_kernel_for(autocast_key(target.device_type)):
        op = find_op(name)
        if op is not None and name.startswith("aten::") and name not in expected:
            yield _first_failure(target, op, CastPolicy.KEEP)


def _first_failure(target: Target, op: OpOverload, policy: CastPolicy) -> Comparison:
    comparison = "", "", "", ""
    for name, call in _calls(target, op):
        comparison = _compared(target, policy, name, call)
        if comparison[1] != comparison[2]:
            break
    return comparison


def _calls(target: Target, op: OpOverload) -> Iterator[tuple[str, Call]]:
    """Returns calls on the CPU with tensors of several dtypes, and with a ``dtype`` argument."""
    args = sample_arguments(op)
    dtypes = {
        "float32": itertools.repeat(torch.float32),
        dtype_name(target.dtype): itertools.repeat(target.dtype),
        "mixed": itertools.cycle((target.dtype, torch.float32)),
        **{dtype_name(dtype): itertools.repeat(dtype) for dtype in target.ineligible_dtypes},
    }
    for name, each in dtypes.items():
        yield name, (op, _with_dtypes(args, each), {})
    if any(argument.name == "dtype" for argument in op._schema.arguments):
        yield "dtype=", (op, args, {"dtype": target.dtype})


def _with_dtypes(args: Any, dtypes: Iterator[torch.dtype]) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(next(dtypes)) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, args)


def _compared(target: Target, policy: CastPolicy, inputs: str, on_cpu: Call) -> Comparison:
    name = qualified_name(on_cpu[0])
    title = f"{name} ({inputs})"
    call = target.tensors(on_cpu)
    with target.region():
        got = _record(lambda: call[0](*call[1], **call[2]))
    if policy is CastPolicy.BANNED:
        return title, "RuntimeError", _ban(target, got), f"register a kernel of {name} that raises"
    expected = _record(lambda: _cast_by_hand(target.device_type, target.dtype, policy, call))
    reference = _record(lambda: _cast_by_hand("cpu", target.dtype, policy, on_cpu))
    mend = _how_to_register(name, policy, inputs)
    errors = [None if run.error is None else target.failure(run.error) for run in (expected, got)]
    if errors[0] is not None and reference.error is None:
        return title, "a result", errors[0], f"add a kernel of {name}, or fall back to the CPU"
    pairs = itertools.zip_longest(expected.kernels, got.kernels, fillvalue=errors[1] or "no call")
    different = next(((want, have) for want, have in pairs if want != have), None)
    if different is not None:
        return title, *different, mend
    if errors[0] is None and errors[1] is not None:
        return title, "a result", errors[1], mend
    difference = None if reference.error else _difference(got.result, reference.result)
    if difference is not None:
        return title, "the CPU's numbers", difference, f"mend the kernel of {name}"
    return title, policy.value, policy.value, ""


def _cast_by_hand(device_type: str, low_dtype: torch.dtype, policy: CastPolicy, call: Call) -> Any:
    """Calls an op with the casts of a policy, outside of regions."""
    (op, args, kwargs), restored = Decision(policy, "").apply(call, device_type, low_dtype)
    return restore_results(op(*args, **kwargs), restored)


def _ban(target: Target, run: Run) -> str:
    """Returns the type of error that a call raised before it reached a kernel."""
    if run.kernels or run.error is None:
        return f"a call of {run.kernels[0]}" if run.kernels else "no error"
    target.failure(run.error)
    is_ban = isinstance(run.error, RuntimeError) and not isinstance(run.error, NotImplementedError)
    return "RuntimeError" if is_ban else type(run.error).__name__


def _how_to_register(name: str, policy: CastPolicy, inputs: str) -> str:
    """Returns the change that makes autocast cast an op by its policy."""
    if policy is CastPolicy.KEEP:
        return f"remove the autocast kernel of {name}, or add it to the table"
    if inputs in ("float64", "int64"):
        return f"cast floating-point tensors in the autocast kernel of {name}, but not float64"
    return f"register {name} as {policy.value} (python -m amp_fx policy --cpp), or change the table"


def _difference(actual: Any, expected: Any) -> str | None:
    """Returns a description of the first result that differs from the CPU's; None without one."""
    for have, want in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if not isinstance(want, torch.Tensor):
            continue
        if have.dtype is not want.dtype or have.shape != want.shape:
            return f"{dtype_name(have.dtype)} of shape {tuple(have.shape)}"
        kind = torch.complex128 if want.is_complex() else torch.float64
        left, right = have.cpu().to(kind), want.to(kind)
        is_both = left.isfinite() & right.isfinite()
        largest = right[is_both].abs().max().item() if is_both.any() else 0.0
        allowed = TOLERANCES.get(want.dtype, TOLERANCES[torch.float32]) * largest
        error = (left - right)[is_both].abs().max().item() if is_both.any() else 0.0
        if error > allowed or not torch.equal(left.isfinite(), right.isfinite()):
            return f"an error of {error:.1e}, allowed {allowed:.1e}"
    return None
