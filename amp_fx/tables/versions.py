"""Which torch versions have which rows: the exceptions to "all of them do".

Source: the headers and the registrations in the released binaries of torch 2.11.0, 2.12.0,
2.13.0, 2.14.1 and 2.15.0. No op has changed its policy between them.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, TypeAlias

from amp_fx.tables.build import Table, ops
from amp_fx.tables.families import NAMED_PRODUCTS, NAMED_REDUCTIONS, ROOT_MEAN_SQUARE

if TYPE_CHECKING:
    from collections.abc import Mapping

Version: TypeAlias = tuple[int, int]

OLDEST: Version = (2, 11)

# Named tensors, and with them every overload over named dimensions, were removed.
_NAMED_DIMENSIONS = (
    *NAMED_PRODUCTS,
    *NAMED_REDUCTIONS,
    *ops("index_copy.dimname norm.names_ScalarOpt_dim"),
)

SINCE: Mapping[str, Version] = {
    # A float32 weight next to a bfloat16 input kept rms_norm from its fused kernel.
    **dict.fromkeys(ROOT_MEAN_SQUARE, (2, 12)),
    **dict.fromkeys(ops("linalg_matrix_sqrth"), (2, 14)),
}
"""The first version whose autocast has the op."""

UNTIL: Mapping[str, Version] = {
    **dict.fromkeys(_NAMED_DIMENSIONS, (2, 13)),
    # Their successors linalg_cholesky and linalg_qr stay.
    **dict.fromkeys(ops("cholesky qr"), (2, 14)),
}
"""The first version whose autocast has the op no more."""

NEWEST: Version = (2, 15)
"""The newest version that the tests were run on; ``pyproject.toml`` allows none above it."""

VERSIONS: tuple[Version, ...] = tuple((2, minor) for minor in range(OLDEST[1], NEWEST[1] + 1))
"""Versions that are supported."""


def is_active(op: str, version: Version) -> bool:
    """Whether autocast of a torch version has a policy for an op that a table lists."""
    if version < SINCE.get(op, version):
        return False
    return op not in UNTIL or version < UNTIL[op]


def active(table: Table, version: Version) -> Table:
    """The rows of a table that a torch version has."""
    rows = {op: policy for op, policy in table.items() if is_active(op, version)}
    return types.MappingProxyType(rows)
