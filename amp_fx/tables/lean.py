"""The ``lean`` preset: norms with low inputs and outputs, and a low residual stream.

On CUDA and similar devices, torch's autocast returns norms in float32, and residual sums are
float32 as well because embeddings are. Casts inside fused kernels are free, but float32 doubles the
size of the tensors that the kernels read, write and save for the backward. With this preset, a sum
of a low and a float32 tensor of the same shape is low (``demote``); other sums do not change, and
losses and ``log_softmax`` remain in float32. In eager code nothing is saved, because each cast is a
kernel.

Source: pytorch/pytorch issue 188955. The CPU's table lists no norms, so they are low anyway.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.op_names import ops

if TYPE_CHECKING:
    from amp_fx.tables.cast_policy import Table

LOWER_PRECISION_IO = ops("group_norm layer_norm native_layer_norm")
SAME_AS_INPUT = ops("rms_norm softmax.int")
DEMOTED = ops("add.Tensor")


def lean(table: Table) -> Table:
    """Returns a device's table with low norms, as far as it lists them, and low sums."""
    norms = {op: CastPolicy.LOWER_PRECISION_IO for op in LOWER_PRECISION_IO if op in table}
    same = {op: CastPolicy.SAME_AS_INPUT for op in SAME_AS_INPUT if op in table}
    sums = dict.fromkeys(DEMOTED, CastPolicy.DEMOTE)
    return types.MappingProxyType({**table, **norms, **same, **sums})


def has_low_sums(table: Table) -> bool:
    """Returns True if a table makes residual sums low."""
    return any(table.get(op) is CastPolicy.DEMOTE for op in DEMOTED)
