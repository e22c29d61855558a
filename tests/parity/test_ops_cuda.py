"""Op by op for CUDA, without a GPU: which op runs in which dtype, against ``torch.autocast``.

AutocastCUDA's kernels are in every build of torch and act on fake CUDA tensors. So the same calls
are made once in eager autocast and once through amp_fx, both on fake tensors, and what reaches the
kernels is compared: the ops below autocast, in order, with the dtypes of their inputs, and the
dtypes of the outputs. Casts themselves are left out of the comparison. Numbers and the backward
need a GPU. As on the CPU (``test_ops_cpu.py``) calls of one op are one program, which is taken
call by call where it differs or breaks up. The fast run takes every second op of ``op_db``; those
in between run on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from amp_fx.dtypes import dtype_name
from amp_fx.graphs.decomposed_kernels import corrected_version
from tests.op_recorder import OpRecorder
from tests.parity import exceptions, oracle
from tests.parity.calls import OPS, Call, assert_alike, op_calls, program_of
from tests.parity.oracle import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tests.parity.oracle import Program

pytestmark = pytest.mark.filterwarnings("ignore")

COMBINATIONS = ((Way.AMBIENT, torch.float16), (Way.BARE, torch.bfloat16))


@dataclasses.dataclass
class Trace:
    """Ops below autocast in one run, and the leaves of its output."""

    ops: list[str]
    outputs: list[str]


class RealDtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives eager calls the dtypes of the real kernel where a fake kernel promises others.

    The versions that do so are compared with real kernels on the CPU (``test_ops_cpu.py``).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = corrected_version(func, args) or func
        return kernel(*args, **kwargs or {})


def trace(
    program: Program, region: torch.dtype | None, kernels: AbstractContextManager[Any] | None = None
) -> Trace:
    """Run a program on fake tensors and write down what it does, within the mode ``kernels``."""
    with oracle.region_of("cuda", region), torch.no_grad():
        program()  # the first call compiles
        with OpRecorder() as recorder, kernels or contextlib.nullcontext():
            leaves = tree_flatten(program())[0]
    outputs = [
        dtype_name(leaf.dtype) if isinstance(leaf, torch.Tensor) else str(type(leaf))
        for leaf in leaves
    ]
    return Trace(recorder.ops, outputs)


def rewritten_trace(program: Callable[..., Any], args: Any, way: Way, dtype: torch.dtype) -> Trace:
    """Traces a program that amp_fx compiled: the only use of amp_fx in this file."""
    compiled = oracle.compile_amp_fx(program, way, dtype)
    return trace(lambda: compiled(args), dtype if way is Way.AMBIENT else None)


def captured_trace(program: Callable[..., Any], args: Any, way: Way, dtype: torch.dtype) -> Trace:
    """Traces the graphs that Dynamo captures from a program in eager autocast."""
    compiled = oracle.compile_reference(program, way, dtype, device="cuda")
    return trace(lambda: compiled(args), dtype if way is Way.AMBIENT else None)


def eager_trace(program: Callable[..., Any], args: Any, way: Way, dtype: torch.dtype) -> Trace:
    """Traces a program in eager autocast; outputs are those of ``oracle.run_eager``."""
    made = trace(lambda: program(args), dtype, RealDtypes())
    if way is Way.AMBIENT:
        return made
    with torch.no_grad():
        plain = program(args)  # as Dynamo captures it: what a bare backend has to return
    with oracle.region_of("cuda", dtype), torch.no_grad(), RealDtypes():
        low = program(args)
    leaves = tree_flatten(tree_map(oracle.cast_like, low, plain))[0]
    made.outputs = [
        dtype_name(leaf.dtype) if isinstance(leaf, torch.Tensor) else str(type(leaf))
        for leaf in leaves
    ]
    return made


def check(calls: Sequence[Call], way: Way, dtype: torch.dtype) -> str | None:
    """Describes how amp_fx differs from eager autocast on a program; None if it does not."""
    program, args = program_of(calls)
    expected = eager_trace(program, args, way, dtype)
    oracle.reset()
    try:
        actual: Trace | Exception = rewritten_trace(program, args, way, dtype)
    except Exception as error:  # noqa: BLE001, reported below if the reference runs
        actual = error
    if actual == expected:
        return None
    oracle.reset()
    try:
        reference = captured_trace(program, args, way, dtype)
    except Exception:  # noqa: BLE001, Dynamo cannot run the call with any backend
        return None
    if actual == reference:
        return None
    return f"\n  expected {expected}\n  captured {reference}\n  got      {actual!r}"


def on_fake_cuda(call: Call) -> Call:
    """The call with its tensors replaced by fake CUDA tensors; call it under the fake mode."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    args, kwargs = tree_map_only(torch.Tensor, fake, (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def as_eager_runs_it(call: Call, way: Way, dtype: torch.dtype) -> Call | None:
    """The call on fake CUDA tensors; None if it cannot be had, or eager code cannot make it."""
    try:
        fake = on_fake_cuda(call)
    except Exception:  # noqa: BLE001, sparse tensors and the like
        return None
    return fake if can_run(fake, way, dtype) else None


def can_run(call: Call, way: Way, dtype: torch.dtype) -> bool:
    """Returns True if eager autocast runs on fake tensors; for ``BARE``, also the plain program."""
    try:
        for region in (dtype, None) if way is Way.BARE else (dtype,):
            with oracle.region_of("cuda", region), torch.no_grad():
                call.function(*call.args, **call.kwargs)
    except Exception:  # noqa: BLE001, whatever eager cannot do is not asked for
        return False
    return True


def check_calls(calls: list[Call], way: Way, dtype: torch.dtype) -> None:
    """Fail with every call that differs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [fake for call in calls if (fake := as_eager_runs_it(call, way, dtype))]
        if not fakes:
            pytest.skip("eager autocast cannot run this op on fake CUDA tensors")
        assert_alike(fakes, functools.partial(check, way=way, dtype=dtype))


def listed_calls() -> Iterator[Call]:
    """The calls of torch's own autocast tests for CUDA."""
    lists = AutocastTestLists(torch.device("cpu"))  # type: ignore[no-untyped-call]
    namespaces = (torch, torch._C._nn, torch.linalg, torch.Tensor)
    for list_name, calls in vars(lists).items():
        for i, (op, args, *rest) in enumerate(calls):
            if isinstance(args, str):
                continue  # einsum, whose arguments the list spells wrongly
            kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
            for namespace in namespaces:
                if hasattr(namespace, op):
                    name = f"{list_name}-{i}-{namespace.__name__}.{op}"
                    yield Call(name, getattr(namespace, op), args, kwargs)


LISTED = {call.name: call for call in listed_calls()}


def cases(names: list[str], *, is_fast: Callable[[int], bool] = lambda _: True) -> list[Any]:
    """Returns both combinations of each op; the fast run takes them in turn, as on the CPU."""
    return [
        exceptions.param(
            exceptions.CUDA_OPS,
            name,
            *combination,
            id=f"{name}-{combination[0].value}-{dtype_name(combination[1])}",
            is_slow=not is_fast(number) or COMBINATIONS[number // 2 % 2] != combination,
        )
        for number, name in enumerate(names)
        for combination in COMBINATIONS
    ]


@pytest.mark.parametrize(
    ("name", "way", "dtype"), cases(sorted(OPS), is_fast=lambda number: number % 2 == 1)
)
def test_op(name: str, way: Way, dtype: torch.dtype) -> None:
    check_calls(list(op_calls(OPS[name], dtype, exhaustive=False)), way, dtype)


@pytest.mark.parametrize(("name", "way", "dtype"), cases(sorted(LISTED)))
def test_listed_op(name: str, way: Way, dtype: torch.dtype) -> None:
    check_calls([LISTED[name]], way, dtype)
