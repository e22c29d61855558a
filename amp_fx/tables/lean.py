"""The ``lean`` preset: normalizations and softmax give back the dtype that they got.

They compute in float32, as everywhere; but torch also keeps their outputs in float32 (CUDA and
its siblings), and what is added to them becomes float32 too: a residual stream behind a
normalization is twice the size. Inside a fused kernel the cast back costs nothing, and the next
matrix product would make it anyway. Losses and ``log_softmax`` keep float32, on which the training
rests. In eager code the casts are kernels and copies of their own, and nothing is saved.

Source: pytorch/pytorch issue 188955. CPU lists none of these ops: they stay low there as it is.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from amp_fx.tables.build import ops
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.families import NORMALIZATIONS, ROOT_MEAN_SQUARE

if TYPE_CHECKING:
    from amp_fx.tables.build import Table

SAME_AS_INPUT = (*NORMALIZATIONS, *ROOT_MEAN_SQUARE, *ops("softmax.int softmax.Dimname"))


def lean(table: Table) -> Table:
    """A device's table with ``same_as_input`` for those of the ops that it lists."""
    changed = {op: CastPolicy.SAME_AS_INPUT for op in SAME_AS_INPUT if op in table}
    return types.MappingProxyType({**table, **changed})
