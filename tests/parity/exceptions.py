"""The one table of ops and models that are known not to match eager autocast, and why.

A test named here is a strict expected failure: it must go on failing for as long as its row
stands, so a row that is no longer needed fails the suite.
"""

from __future__ import annotations

import pytest

# Open: each of these is to go.
_TORCH_KERNEL = "an unlisted kernel calls listed ops inside, where eager autocast is still on"
_ISLAND = "a weight used inside an island and outside it is cast once for each"
_GRAPHS = "eager shares the cast of a weight between the graphs of one region"
_OVERLOAD = "the policy stands at another overload than the one that is called"
_NO_GUARD = "opening the node wants a CUDA device guard"

CPU_OPS: dict[str, str] = {
    "linalg_pinv-ambient-bfloat16": _TORCH_KERNEL,
    "linalg_pinv_hermitian-bare-float16": _TORCH_KERNEL,
    "nn_functional_bilinear-bare-float16": _TORCH_KERNEL,
    "torch__scaled_mm-bare-float16": _TORCH_KERNEL,
}
"""Test id in ``test_ops_cpu.py`` (as ``matmul-bare-float16``) -> reason."""

CUDA_OPS: dict[str, str] = {
    "masked_logsumexp-ambient-float16": _NO_GUARD,
    "masked_logsumexp-bare-bfloat16": _NO_GUARD,
    "masked_prod-ambient-float16": _NO_GUARD,
    "nn_functional_interpolate_bicubic-ambient-float16": _OVERLOAD,
    "nn_functional_interpolate_bicubic-bare-bfloat16": _OVERLOAD,
    "nn_functional_interpolate_bilinear-ambient-float16": _OVERLOAD,
    "nn_functional_interpolate_bilinear-bare-bfloat16": _OVERLOAD,
    "nn_functional_interpolate_linear-ambient-float16": _OVERLOAD,
    "nn_functional_interpolate_linear-bare-bfloat16": _OVERLOAD,
    "nn_functional_interpolate_nearest-ambient-float16": _OVERLOAD,
    "nn_functional_interpolate_nearest-bare-bfloat16": _OVERLOAD,
    "nn_functional_interpolate_nearest-exact-ambient-float16": _OVERLOAD,
    "nn_functional_interpolate_nearest-exact-bare-bfloat16": _OVERLOAD,
    "nn_functional_interpolate_trilinear-ambient-float16": _OVERLOAD,
    "nn_functional_interpolate_trilinear-bare-bfloat16": _OVERLOAD,
    "nn_functional_upsample_bilinear-ambient-float16": _OVERLOAD,
    "nn_functional_upsample_bilinear-bare-bfloat16": _OVERLOAD,
    "nn_functional_upsample_nearest-ambient-float16": _OVERLOAD,
    "nn_functional_upsample_nearest-bare-bfloat16": _OVERLOAD,
}
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
    "transformer_encoder_eval-ambient-bfloat16": _TORCH_KERNEL,
    "transformer_encoder_eval-ambient-float16": _TORCH_KERNEL,
    "transformer_encoder_eval-bare-bfloat16": _TORCH_KERNEL,
    "transformer_encoder_eval-bare-float16": _TORCH_KERNEL,
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
