"""The ``lean`` preset: norms take and give low values, and the residual stream is low.

Normalizations compute in float32, as everywhere; but torch also keeps their outputs in float32
(CUDA and its siblings), and what is added to them becomes float32 too. And it keeps the stream of
residual sums in float32, as embeddings are: each low branch is widened when it is added, and the
backward does the same. Inside a fused kernel the casts cost nothing, but what the kernel reads,
writes and saves is twice the size. Here a sum of a low tensor and a float32 one of its shape is
low (``demote``): other sums, with biases, masks that are broadcast, numbers and float32 noise,
stay what they are. Losses and ``log_softmax`` keep float32, on which the training rests. In eager
code the casts are kernels and copies of their own, and nothing is saved.

Source: pytorch/pytorch issue 188955; a model that is stored low has such a stream too. The CPU
lists no normalizations: they stay low there as it is.
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
    """A device's table with other policies for those of the ops that it lists, and low sums."""
    norms = {op: CastPolicy.LOWER_PRECISION_IO for op in LOWER_PRECISION_IO if op in table}
    same = {op: CastPolicy.SAME_AS_INPUT for op in SAME_AS_INPUT if op in table}
    sums = dict.fromkeys(DEMOTED, CastPolicy.DEMOTE)
    return types.MappingProxyType({**table, **norms, **same, **sums})


def has_low_sums(table: Table) -> bool:
    """Returns True if the sums of a residual stream are low by a table."""
    return any(table.get(op) is CastPolicy.DEMOTE for op in DEMOTED)
