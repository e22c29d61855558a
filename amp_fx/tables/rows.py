"""Batch-invariant ops of ATen, and reasons why other ops are not.

``numerics="invariant"`` compiles the ops in this file, pointwise ops, ops that only move elements,
and ops without floating-point inputs. It raises an error for any other op.
"""

from __future__ import annotations

_COUNT = "bincount histc"
_SELECT = "argsort cummax cummin kthvalue median mode nonzero sort topk"
_IN_ORDER = "cumprod cumsum index_add index_copy index_put scatter scatter_add scatter_reduce"
_LOSSES = "nll_loss_forward nll_loss2d_forward"
_OTHERS = "copy_ masked_scatter one_hot rounded upsample_nearest1d upsample_nearest2d"
ROWWISE = frozenset(f"{_COUNT} {_SELECT} {_IN_ORDER} {_LOSSES} {_OTHERS}".split())
"""Ops that count, select elements, or accumulate them sequentially in the order of the tensor; and
losses, which sum over rows on purpose. ``rounded`` is an op of
amp_fx."""

_ARITHMETIC = """
    abs add ceil clamp clamp_max clamp_min div floor maximum minimum mul neg reciprocal relu round
    rsub sgn sign sqrt square sub threshold trunc
"""
_CHOICE = (
    "_to_copy convert_element_type copysign eq fill ge gt isinf isnan le lt masked_fill ne where"
)
EXACT = frozenset(f"{_ARITHMETIC} {_CHOICE}".split())
"""Pointwise ops that round once, so that vector code and scalar code return the same bits."""

MEASURED = frozenset(
    [
        "convolution",
        "native_layer_norm",
        "native_group_norm",
        "_native_batch_norm_legit_no_training",
    ]
)
"""Ops whose kernels are tested for each size (``amp_fx.devices.rows``)."""

_BATCH_NORM = "its statistics are those of the whole batch: call model.eval(), or use LayerNorm"
MIXING = dict.fromkeys(
    (
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "native_batch_norm",
    ),
    _BATCH_NORM,
)
"""Ops that mix rows, with a replacement."""

RANDOM = (
    "it draws random numbers, and those of a row depend on the rows before it: set the "
    "probability of dropout to 0, or call model.eval()"
)
CAPACITY = (
    "it counts the tokens that were routed to an expert before this one, so a row depends on other "
    "rows through the capacity of the expert: route without a capacity"
)
UNKNOWN = "it is not among the ops in amp_fx/tables/rows.py, which are known to be batch-invariant"

ROUTING = frozenset(["argmax", "max", "sort", "topk"])
"""Ops that choose an expert for a token."""
