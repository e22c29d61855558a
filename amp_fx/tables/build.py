"""How op tables are made: families of ops under policies, merged into one mapping."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from amp_fx.errors import PolicyError
from amp_fx.tables.cast_policy import CastPolicy

Table: TypeAlias = Mapping[str, CastPolicy]
"""Policies by qualified overload name: ``"aten::softmax.int"``, ``"aten::linear"``."""

Row: TypeAlias = tuple[CastPolicy, Iterable[str]]
"""A policy and the ops that it holds for."""


def ops(names: str) -> tuple[str, ...]:
    """A family of ops from names between blanks; ``aten::`` where none is given."""
    return tuple(name if "::" in name else f"aten::{name}" for name in names.split())


def build_table(rows: Iterable[Row]) -> Table:
    """Rows merged into one read-only table.

    Args:
        rows: Policies with their ops, given by qualified overload name.

    Returns:
        The policy of each op.

    Raises:
        PolicyError: An op is listed twice, under one policy or under two; a name has no
            namespace; or a policy is not a ``CastPolicy``.
    """
    table: dict[str, CastPolicy] = {}
    for policy, names in rows:
        for name in names:
            check_entry(name, policy)
            if name in table:
                raise PolicyError(_listed_twice(name, table[name], policy))
            table[name] = policy
    return types.MappingProxyType(table)


def check_entry(name: str, policy: CastPolicy) -> None:
    """Checks one entry of a table.

    Raises:
        PolicyError: The name is not qualified, or the policy is not a ``CastPolicy``.
    """
    if "::" not in name:
        raise PolicyError(
            f"{name!r} is not the qualified name of an op overload; write it like "
            f"'aten::{name or 'softmax.int'}'"
        )
    if not isinstance(policy, CastPolicy):
        allowed = ", ".join(f"CastPolicy.{p.name}" for p in CastPolicy)
        raise PolicyError(f"{name} has the policy {policy!r}; allowed are {allowed}")


def _listed_twice(name: str, first: CastPolicy, second: CastPolicy) -> str:
    if first is second:
        return f"{name} is listed twice under {first.value}; list it once"
    return f"{name} is listed under {first.value} and under {second.value}; keep one of them"
