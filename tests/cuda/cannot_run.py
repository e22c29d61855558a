"""Ops that cannot run on the emulated device, with reasons."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Reason:
    """Reason why an op cannot run.

    Attributes:
        cause: The cause in words.
        sign: Part of the error message that identifies the cause.
    """

    cause: str
    sign: str


INTEGERS = Reason(
    "takes integers alone, which autocast leaves alone", "not implemented for 'Float'"
)
COMPLEX = Reason("takes complex numbers, which autocast leaves alone", "complex")
NO_CUDA = Reason("CUDA has no kernel of it either", "from the 'CUDA' backend")
SPARSE = Reason("sparse tensors have no memory of the host's here", "Spars")
COMPILED = Reason("is compiled by CUDA's runtime compiler", "CUDA driver version")
NO_CPU = Reason("is a kernel of CUDA's alone, called by name", "from the 'CPU' backend")

CANNOT_RUN: dict[str, Reason] = {
    **dict.fromkeys(
        (
            "__rand__",
            "__ror__",
            "__rxor__",
            "bincount",
            "bitwise_and",
            "bitwise_left_shift",
            "bitwise_not",
            "bitwise_or",
            "bitwise_right_shift",
            "bitwise_xor",
            "gcd",
            "lcm",
            "tril_indices",
            "triu_indices",
        ),
        INTEGERS,
    ),
    **dict.fromkeys(("imag", "istft", "view_as_real"), COMPLEX),
    **dict.fromkeys(
        ("histogram", "histogramdd", "torch_ops_aten__scaled_dot_product_flash_attention_for_cpu"),
        NO_CUDA,
    ),
    **dict.fromkeys(("sparse_mm_reduce", "to_sparse"), SPARSE),
    **dict.fromkeys(
        (
            "jiterator_2inputs_2outputs",
            "jiterator_4inputs_with_extra_args",
            "jiterator_binary",
            "jiterator_binary_return_by_ref",
            "jiterator_unary",
        ),
        COMPILED,
    ),
    **dict.fromkeys(
        ("torch_ops_aten__efficient_attention_forward", "torch_ops_aten__flash_attention_forward"),
        NO_CPU,
    ),
    "linalg_pinv_singular": Reason(
        "autocast hands it low numbers, which it refuses", "expected a tensor with 2 or more"
    ),
    "nn_functional_binary_cross_entropy": Reason("autocast bans it", "unsafe to autocast"),
    "nn_functional_one_hot": Reason("takes integers alone", "LongTensor"),
    "unravel_index": Reason("takes integers alone", "integer dtype"),
}
"""By op; all others run."""
