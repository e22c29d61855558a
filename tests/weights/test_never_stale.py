"""Writes that are hard to detect: through old aliases, and by other processes.

Each is tested with all three kinds of cached values, by comparing numbers alone.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests.distributed.spawn import run_ranks
from tests.weights.keeping import (
    FROZEN,
    TRAINED,
    WAYS,
    Line,
    Way,
    batch,
    check,
    contents,
    is_right,
    make_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Scale = Callable[[float], Any]
    Write = Callable[[torch.Tensor], Any]
    Agent = Callable[[Callable[[], Any]], Callable[[], Any]]

pytestmark = [pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")]
ALL_WAYS = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


# --------------------------------------------- through an alias that was taken before the call


def by_array(weight: torch.Tensor) -> Scale:
    array = weight.detach().numpy()
    return lambda factor: np.multiply(array, factor, out=array)


def by_dlpack(weight: torch.Tensor) -> Scale:
    return from_dlpack(weight.detach()).mul_


def by_pointer(weight: torch.Tensor) -> Scale:
    pointer = ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))
    array = np.ctypeslib.as_array(pointer, (weight.numel(),))
    return lambda factor: np.multiply(array, factor, out=array)


ALIASES = {alias.__name__: alias for alias in (by_array, by_dlpack, by_pointer)}


@ALL_WAYS
def test_a_write_right_after_values_were_made(way: Way) -> None:
    x = batch()
    stale = []
    for alias, is_seen_before, before, between in itertools.product(
        ALIASES, (False, True), range(3), range(3)
    ):
        model, held = make_line()  # all of them share the code
        program = way.compile(model)
        if is_seen_before:
            way.warm(program, x)
            model.weight(1).data.mul_(2)
            held[1] = held[1] * 2
        for _ in range(before):
            check(way, program, held, x)
        scale = ALIASES[alias](model.weight(1))
        for _ in range(between):
            check(way, program, held, x)
        for factor in (-3.0, 0.5):
            scale(factor)
            held[1] = held[1] * factor
            if not is_right(way, program, held, x):
                stale.append((alias, is_seen_before, before, between, factor))
    assert not stale, "a write first, calls, then an alias, calls, then a write of which factor"


@pytest.mark.slow
def test_received_while_a_call_is_under_way(tmp_path: Path) -> None:
    """A broadcast takes the pointer, a call follows, and then the bytes come."""
    for found in run_ranks("tests.weights.broadcast_program", tmp_path, 2):
        assert found["received"] == {way.name: True for way in WAYS}


# ------------------------------------------------------ a few elements, through an older array


@ALL_WAYS
def test_a_part_written_through_an_older_array_is_found(way: Way) -> None:
    x = batch(64)
    stale = []
    for first, num_rows in ((0, 8), (31, 1), (63, 1)):
        torch._dynamo.reset()  # a graph that found such a write casts from there on
        held = [contents(first, 64)]
        model = Line(held)
        program = way.compile(model)
        array = model.weight(0).detach().numpy()
        way.warm(program, x)
        array[first : first + num_rows] *= -8
        held[0][first : first + num_rows] *= -8
        if not any(is_right(way, program, held, x) for _ in range(200)):
            stale.append(first)
            continue
        for _ in range(20):
            check(way, program, held, x)
    assert not stale, "rows from which on a write was never found"


# ---------------------------------------------------------------------------------- off is off


class Off(nn.Module):
    """A program that switches mixed precision off itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", [FROZEN, TRAINED], ids=lambda way: way.name)
@pytest.mark.parametrize("is_inside", [False, True], ids=["around", "inside"])
def test_off_keeps_nothing_and_changes_no_bit(way: Way, is_inside: bool) -> None:
    (line, _), x = make_line(), batch()
    model: nn.Module = Off(line) if is_inside else line
    for k in range(2):
        results = []
        for program in (torch.compile(model, dynamic=False), way.compile(model)):
            for _ in range(3):
                if is_inside:
                    results.append(way.call(program, x))
                else:
                    with torch.autocast("cpu", enabled=False):
                        results.append(way.call(program, x))
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))
        stats = weight_cache.stats()
        assert (stats.bytes, stats.entries, stats.values) == (0, 0, ())
        if k == 0:
            line.weight(1).data.mul_(-3)
