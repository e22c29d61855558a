"""The calls that the op tests make: the samples of ``op_db``, in several dtypes and spellings."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations, common_utils, opinfo
from torch.utils._pytree import tree_map_only

from tests.parity import exceptions, oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Given = list[tuple[tuple[Any, ...], dict[str, Any]]]

SEED = 1234


@dataclasses.dataclass
class Call:
    """One call of an op."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_reproducible(self) -> bool:
        """True if two runs of it in eager mode give the same numbers."""
        return not self.name.startswith(tuple(exceptions.DTYPES_ONLY))


def plain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of op_db's wrapper that seeds: runs are seeded here, and it breaks graphs."""
    return function(*args, **kwargs)


common_methods_invocations.wrapper_set_seed = plain_call  # type: ignore[assignment, attr-defined]

# OpInfo looks for a unittest.TestCase on the stack, and reads the source of every frame for it.
# There is none.
for _module in (common_utils, opinfo.core):
    _module.extract_test_fn = lambda: None  # type: ignore[attr-defined]


def seed_cpu(seed: int | None = None) -> None:
    """In place of OpInfo's seeding, once per sample; where no other device is, seeds the same.

    ``torch.manual_seed`` writes down a stack trace for each kind of device that is not here.
    """
    seed = common_utils.SEED if seed is None else seed
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


common_utils.set_rng_seed = seed_cpu

OPS = {op.formatted_name: op for op in common_methods_invocations.op_db}


def program_of(calls: Sequence[Call]) -> tuple[Callable[[Given], list[Any]], Given]:
    """Returns one program that runs all the calls, and its arguments: their (args, kwargs)."""
    functions = tuple(call.function for call in calls)

    def program(given: Given) -> list[Any]:
        results = []
        for function, (args, kwargs) in zip(functions, given, strict=True):
            results.append(function(*args, **kwargs))
        return results

    return program, [(call.args, call.kwargs) for call in calls]


def assert_alike(calls: Sequence[Call], check: Callable[[Sequence[Call]], str | None]) -> None:
    """Checks calls as one program, and one by one where they differ or it breaks up.

    Args:
        calls: The calls.
        check: Says how a program of calls differs from its oracle; None if it does not.
    """
    together = check(calls)
    if together is None and oracle.is_one_graph():
        return
    found = [(call.name, check([call])) for call in calls]
    wrong = [f"{name}: {how}" for name, how in found if how]
    assert not wrong, "\n".join(wrong)
    assert together is None, f"only all calls together differ: {together}"


def with_dtypes(tree: Any, dtypes: Iterator[torch.dtype]) -> Any:
    """Returns the tree with its float32 tensors brought to the dtypes, in order."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        new = tensor.detach().to(next(dtypes))
        return new.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, cast, tree)


@functools.lru_cache(maxsize=4)
def samples_of(name: str) -> tuple[Any, ...]:
    """Returns the samples of an op, for all combinations it is tested in; not to be written to."""
    op: Any = OPS[name]
    torch.manual_seed(SEED)
    try:
        return tuple(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    except Exception:  # noqa: BLE001, the op has no samples for the CPU build
        return ()


def op_calls(op: Any, low_dtype: torch.dtype, *, exhaustive: bool) -> Iterator[Call]:
    """Calls of an op: float32, low, and mixed inputs; as function, method and in place."""
    samples = samples_of(op.formatted_name)
    if not samples:
        return
    picked = list(range(len(samples))) if exhaustive else sorted({0, len(samples) // 2})
    for i in picked:
        sample = samples[i]
        args = (sample.input, *sample.args)
        yield Call(f"{op.name}, sample {i}", op.op, args, sample.kwargs)
        is_last = i == picked[-1]
        if exhaustive or is_last:
            low = with_dtypes((args, sample.kwargs), itertools.repeat(low_dtype))
            yield Call(f"{op.name}, sample {i}, low inputs", op.op, *low)
            mix = itertools.cycle((low_dtype, torch.float32))
            mixed = with_dtypes((args, sample.kwargs), mix)
            yield Call(f"{op.name}, sample {i}, mixed inputs", op.op, *mixed)
        if op.method_variant is not None and (exhaustive or is_last):
            yield Call(f"{op.name}, sample {i}, method", op.method_variant, args, sample.kwargs)
        if op.inplace_variant is not None and (exhaustive or is_last):
            yield Call(
                f"{op.name}, sample {i}, in place",
                on_a_copy(op.inplace_variant),
                args,
                sample.kwargs,
            )


def on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place function on a copy, as a leaf that requires grad cannot be written to."""

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(first.clone(), *args, **kwargs)

    return call
