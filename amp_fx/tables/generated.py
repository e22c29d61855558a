"""Lists ops that inductor's generated C++ computes with the bits of ATen's kernels on the CPU.

Measured op by op over every pointwise op of ATen, with ``numerics="strict"`` on torch 2.15 and
``emulate_precision_casts`` on 2.13: every number of bfloat16 and float16, and 65,536 bit patterns
of float32 (``tests/test_eager_numerics.py`` measures the ops that are said to be exact again).
What is neither pointwise nor among ``MOVES`` adds up in an order of its own, and counts as inexact.
"""

from __future__ import annotations

_MAKE = "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_zeros fill"
_MOVE = """
    as_strided_scatter cat clone constant_pad_nd copy diagonal_scatter embedding flip gather
    index index_select _unsafe_index lift_fresh_copy masked_select repeat roll select_backward
    select_scatter slice_backward slice_scatter stack _to_copy tril triu unbind_copy _unsafe_view
    _reshape_alias view_copy expand_copy permute_copy squeeze_copy unsqueeze_copy where
"""
_COMPARE = "all amax amin aminmax any argmax argmin max min"
MOVES = frozenset(f"{_MAKE} {_MOVE} {_COMPARE}".split())
"""Ops that give elements as they are, or say which is largest."""

_INEXACT = """
    acosh addcmul asinh atanh celu cosh elu fmax fmin fmod gelu gelu_backward igammac ldexp lerp
    logaddexp2 logit logit_backward mish mvlgamma nextafter polygamma relu6 remainder rsqrt selu
    sigmoid_backward silu_backward sinc sinh softshrink xlogy
"""
INEXACT = frozenset(_INEXACT.split())
"""Pointwise ops whose generated code differs in a low dtype; so do all ``special_*``."""

_FLOAT32 = """
    acos asin atan cos erf erfc erfinv exp i0 igamma log log10 log2 logaddexp silu sin sqrt
    tan tanh tanh_backward
"""
INEXACT_IN_FLOAT32 = frozenset(_FLOAT32.split())
"""Pointwise ops whose generated code differs in float32, where ATen calls another library."""

EXACT_POWERS = (1, 2)
"""The exponents of which ``pow`` is exact."""

SCALING = frozenset(["div", "mul"])
"""Ops of which generated code rounds a tensor of one number to the low dtype first; of all ops it
rounds numbers."""
