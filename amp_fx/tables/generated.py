"""Ops for which inductor's generated C++ returns the same bits as ATen's CPU kernels.

Measured for every pointwise op of ATen, with ``numerics="strict"`` on torch 2.15 and
``emulate_precision_casts`` on 2.13: for all bfloat16 and float16 numbers, and for 65,536 bit
patterns of float32. Vector code and scalar code were both measured, because strides and sizes
decide which elements of a tensor each of them computes. ``tests/test_eager_numerics.py`` repeats
the measurement for exact ops. Ops that are neither pointwise nor in ``MOVES`` count as inexact,
because their order of sums differs.
"""

from __future__ import annotations

_MAKE = "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_zeros fill"
_MOVE = """
    as_strided_scatter cat clone constant_pad_nd copy diagonal_scatter embedding flip gather
    index index_select _unsafe_index lift_fresh_copy masked_select repeat roll select_backward
    select_scatter slice_backward slice_scatter stack _to_copy tril triu unbind_copy unsafe_split
    unsafe_split_with_sizes _unsafe_view _reshape_alias view_copy expand_copy permute_copy
    squeeze_copy unsqueeze_copy where
"""
_COMPARE = "all amax amin aminmax any argmax argmin max min"
MOVES = frozenset(f"{_MAKE} {_MOVE} {_COMPARE}".split())
"""Ops that return elements unchanged, or the position of an extreme element.

Ops that return views although their schemas say otherwise (``unsafe_split``) must be among them:
inductor would reuse the memory of their input while the views are read.
"""

_INEXACT = """
    acosh addcmul asin asinh atan2 atanh celu cosh elu erf fmax fmin fmod gelu gelu_backward igammac
    ldexp lerp lgamma logaddexp2 logit logit_backward mish mvlgamma nextafter polygamma relu6
    remainder rsqrt selu sigmoid_backward silu_backward sin sinc sinh softshrink xlogy
"""
INEXACT = frozenset(_INEXACT.split())
"""Pointwise ops whose generated code differs in a low dtype; all ``special_*`` ops do as well."""

_FLOAT32 = """
    acos atan cos digamma erfc erfinv exp exp2 expm1 hypot i0 igamma log log10 log1p log2 logaddexp
    sigmoid silu softplus sqrt tan tanh tanh_backward
"""
INEXACT_IN_FLOAT32 = frozenset(_FLOAT32.split())
"""Pointwise ops whose generated code differs in float32, because ATen calls another library."""

SEQUENCES = frozenset(["linspace", "logspace"])
"""Ops that create a tensor from numbers; ``arange`` of integers is exact, of floats it is not."""

EXACT_POWERS = (1, 2)
"""Exponents for which ``pow`` is exact."""

SCALING = frozenset(["div", "mul"])
"""Ops for which generated code rounds tensors without dimensions to the low dtype first. Python
numbers are rounded for all ops. Tensors without dimensions of a wider dtype are rounded or not,
depending on whether the kernel computes them itself."""
