"""The ``lean`` preset: normalizations and softmax give back the dtype that they got.

They compute in float32, as everywhere; but torch also keeps their outputs in float32 (CUDA and
its siblings), so that a residual stream or an attention matrix is saved for the backward at
twice the size, next to the low copy that the next matrix product makes of it. Inside a fused
kernel the cast back costs nothing, and that product would have made it anyway. Losses and
``log_softmax`` keep float32, on which the training rests.

Source: pytorch/pytorch issue 188955. CPU lists none of these ops: they stay low there as it is.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from amp_fx.cast_policy import CastPolicy
from amp_fx.tables.build import ops
from amp_fx.tables.families import NORMALIZATIONS, ROOT_MEAN_SQUARE

if TYPE_CHECKING:
    from amp_fx.tables.build import Table

SAME_AS_INPUT = (*NORMALIZATIONS, *ROOT_MEAN_SQUARE, *ops("softmax.int softmax.Dimname"))


def lean(table: Table) -> Table:
    """A device's table with ``same_as_input`` for those of the ops that it lists."""
    changed = {op: CastPolicy.SAME_AS_INPUT for op in SAME_AS_INPUT if op in table}
    return types.MappingProxyType({**table, **changed})
