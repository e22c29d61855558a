"""Ops that cannot run on the emulated device, by group."""

from __future__ import annotations

CANNOT_RUN: dict[str, str] = {
    # They take integers alone, which autocast does not touch.
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
        "not implemented for 'Float'",
    ),
    "nn_functional_one_hot": "LongTensor",
    "unravel_index": "integer dtype",
    # They take complex numbers, which autocast does not touch.
    **dict.fromkeys(("imag", "istft", "view_as_real"), "complex"),
    # CUDA has no kernel of them either.
    **dict.fromkeys(
        ("histogram", "histogramdd", "torch_ops_aten__scaled_dot_product_flash_attention_for_cpu"),
        "from the 'CUDA' backend",
    ),
    # Sparse tensors have no memory of the host's here.
    **dict.fromkeys(("sparse_mm_reduce", "to_sparse"), "Spars"),
    # CUDA's runtime compiler compiles them.
    **dict.fromkeys(
        (
            "jiterator_2inputs_2outputs",
            "jiterator_4inputs_with_extra_args",
            "jiterator_binary",
            "jiterator_binary_return_by_ref",
            "jiterator_unary",
        ),
        "CUDA driver version",
    ),
    # They are kernels of CUDA's alone, called by name.
    **dict.fromkeys(
        ("torch_ops_aten__efficient_attention_forward", "torch_ops_aten__flash_attention_forward"),
        "from the 'CPU' backend",
    ),
    # Autocast hands it low numbers, which it refuses.
    "linalg_pinv_singular": "expected a tensor with 2 or more",
    # Autocast bans it.
    "nn_functional_binary_cross_entropy": "unsafe to autocast",
}
"""Part of the error by op; all others run."""
