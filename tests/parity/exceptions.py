"""The one table of ops and models that are known not to match eager autocast, and why.

A test named here is a strict expected failure: it must go on failing for as long as its row
stands, so a row that is no longer needed fails the suite.
"""

from __future__ import annotations

import pytest
import torch

# Open: each of these is to go.
_ISLAND = "a weight used inside an island and outside it is cast once for each"
_GRAPHS = "eager shares the cast of a weight between the graphs of one region"
_NO_CUDA = "it runs as an island, whose torch.autocast turns itself off where there is no CUDA"

CPU_OPS: dict[str, str] = {}
"""Test id in ``test_ops_cpu.py`` (as ``matmul-bare-float16``) -> reason."""

_ISLANDS_WITHOUT_CUDA = {
    "masked_logsumexp-ambient-float16": _NO_CUDA,
    "masked_logsumexp-bare-bfloat16": _NO_CUDA,
    "masked_prod-ambient-float16": _NO_CUDA,
}
CUDA_OPS: dict[str, str] = {} if torch.cuda.is_available() else _ISLANDS_WITHOUT_CUDA
"""Test id in ``test_ops_cuda.py`` -> reason."""

MODELS: dict[str, str] = {
    "disabled_function-ambient-bfloat16": _GRAPHS,
    "disabled_function-ambient-float16": _GRAPHS,
    "graph_break_in_a_loop-ambient-bfloat16": _GRAPHS,
    "graph_break_in_a_loop-ambient-float16": _GRAPHS,
    "graph_break_in_the_middle-ambient-bfloat16": _GRAPHS,
    "graph_break_in_the_middle-ambient-float16": _GRAPHS,
    "graph_break_inside_a_region-ambient-bfloat16": _GRAPHS,
    "graph_break_inside_a_region-ambient-float16": _GRAPHS,
    "two_calls_in_one_region-ambient-bfloat16": _GRAPHS,
    "two_calls_in_one_region-ambient-float16": _GRAPHS,
    "vmap-ambient-bfloat16": _ISLAND,
    "vmap-ambient-float16": _ISLAND,
    "vmap-bare-bfloat16": _ISLAND,
    "vmap-bare-float16": _ISLAND,
}
"""Test id in ``test_models.py`` (as ``lstm_cell-ambient-bfloat16``) -> reason."""


def param(table: dict[str, str], *values: object, id: str) -> object:  # noqa: A002
    """A ``pytest.param`` that is a strict expected failure if ``table`` has a row for ``id``."""
    marks = [pytest.mark.xfail(strict=True, reason=table[id])] if id in table else []
    return pytest.param(*values, id=id, marks=marks)
