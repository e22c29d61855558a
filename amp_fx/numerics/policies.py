"""Policies that a report suggests: of its suspects, and of the ranges that were seen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_fx.numerics.suspects import common_pattern
from amp_fx.numerics.words import limit_of, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.numerics.records import OpRecord, Suspect
    from amp_fx.policies.policy import Policy


def with_reasons(policy: Policy, entries: Iterable[tuple[str, str, str]]) -> Policy:
    """A policy with some ops of modules in float32, and the reasons for a file.

    Entries are module patterns (``""`` is the whole program), ops (``""`` is all of the module)
    and reasons.
    """
    for pattern, op, why in entries:
        value = {op: "fp32"} if op else "fp32"
        changed = policy.with_modules({pattern or "*": value})
        reasoned = dataclasses.replace(changed.modules[-1], why=why)
        policy = dataclasses.replace(changed, modules=(*changed.modules[:-1], reasoned))
    return policy


def policy_of_suspects(suspects: Iterable[Suspect], base: Policy) -> Policy:
    """A policy that runs suspects of the forward in float32."""
    entries = [(s.module, s.op, s.why) for s in suspects if s.stage == "forward" and s.is_mendable]
    return with_reasons(base, entries)


def policy_of_ranges(nodes: Iterable[OpRecord], max_abs: float, base: Policy) -> Policy:
    """A policy that runs ops in float32 whose inputs or results exceed a value."""
    seen: dict[tuple[str, str], OpRecord] = {}
    for node in nodes:
        is_low = node.stage == "forward" and node.op and node.dtype in ("float16", "bfloat16")
        if not is_low or not node.max_abs > max_abs:
            continue
        key = (node.module, node.op)
        if key not in seen or node.max_abs > seen[key].max_abs:
            seen[key] = node
    entries = [
        (common_pattern([module]), op, _range_words(node, max_abs))
        for (module, op), node in seen.items()
    ]
    return with_reasons(base, entries)


def _range_words(node: OpRecord, max_abs: float) -> str:
    limit = limit_of(node.dtype)
    return (
        f"|x| is up to {number(node.max_abs)}, more than {max_abs:g}; "
        f"the limit of {node.dtype} is {limit:.6g}"
    )
