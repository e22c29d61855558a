"""Which policy holds at a place of a program, carried by autocast's own state.

A region with a policy of the user's own must hold wherever a region of ``torch.autocast``
does: in eager code, in what Dynamo captures, in its guards, per thread, after exceptions.
All of that exists for the state of autocast, so the policy travels in it: two device types
that no tensor is ever on (``regions.CARRIERS``) keep an autocast dtype each, and an unusual
pair of dtypes there is the number of a policy. Then

- a captured region is an ordinary ``_enter_autocast`` node, for a carrier,
- Dynamo's guard on the state of autocast recompiles when the policy changes,
- the state is thread-local, and autograd's threads inherit it.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import PolicyError
from amp_fx.policies.changes import ModuleOverride, RuleOverride
from amp_fx.regions.module_path import path_of
from amp_fx.regions.state import CARRIERS, AutocastState, is_code

if TYPE_CHECKING:
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_path import Place
    from amp_fx.tables.cast_policy import CastPolicy

_lock = threading.Lock()
_numbers: dict[int, int] = {}
"""Number of a policy by ``id``; ``_policies`` keeps them alive."""
_policies: list[Policy] = []
_distinct: dict[Policy, int] = {}


def codes_of(policy: Policy) -> tuple[torch.dtype, ...]:
    """The dtypes of the carriers that stand for a policy; equal policies share them.

    Raises:
        PolicyError: More policies are in use than there are codes (some 1,600).
    """
    number = _numbers.get(id(policy))
    if number is None:
        number = _register(policy)
    quotient, remainder = divmod(number, len(_CODES))
    return _CODES[quotient], _CODES[remainder]


def policy_of(state: AutocastState) -> Policy | None:
    """The policy of the innermost region that names one; None if none does."""
    low_dtypes = dict(state.low_dtypes)
    return _policy_of_codes(tuple(low_dtypes.get(carrier) for carrier in CARRIERS))


def ambient_policy() -> Policy | None:
    """The same for the calling thread."""
    return _policy_of_codes(tuple(torch.get_autocast_dtype(carrier) for carrier in CARRIERS))


def carrying(state: AutocastState, policy: Policy) -> AutocastState:
    """A state in which a policy holds."""
    codes = dict(zip(CARRIERS, codes_of(policy), strict=True))
    low_dtypes = tuple((device, codes.get(device, low)) for device, low in state.low_dtypes)
    return dataclasses.replace(state, low_dtypes=low_dtypes)


def at_place(policy: Policy, place: Place) -> Policy:
    """A policy as it holds at one place of a program, wherever it is asked.

    A compiled graph is inside of no module when it runs: what holds for the modules around is
    laid down for all, and rules are told of these.
    """
    if not policy.resolver.depends_on_place:
        return policy
    override = policy.resolver.module_override(place)
    return dataclasses.replace(
        policy,
        modules=() if override is None else (ModuleOverride("*", override.policy),),
        rules=tuple(RuleOverride(_PlacedRule(rule, path_of(place))) for rule in policy.rules),
    )


@dataclasses.dataclass(frozen=True)
class _PlacedRule:
    """A rule that is told of one module path, wherever it is asked."""

    rule: RuleOverride
    path: str

    @property
    def __name__(self) -> str:
        return self.rule.name

    def __call__(self, op: str, _: str, shapes: Any, dtypes: Any) -> CastPolicy | str | None:
        return self.rule.function(op, self.path, shapes, dtypes)


def _policy_of_codes(codes: tuple[torch.dtype | None, ...]) -> Policy | None:
    if codes[0] not in _INDEX or codes[1] not in _INDEX:
        return None
    return _policies[_INDEX[codes[0]] * len(_CODES) + _INDEX[codes[1]]]


def _register(policy: Policy) -> int:
    with _lock:
        if policy not in _distinct:
            if len(_distinct) == len(_CODES) ** len(CARRIERS):
                raise PolicyError(f"more than {len(_distinct)} policies in one process")
            _distinct[policy] = len(_policies)
            _policies.append(policy)
        number = _distinct[policy]
        if _policies[number] is policy:
            _numbers[id(policy)] = number
        return number


_CODES = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and is_code(d)}, key=str)
)
_INDEX = {code: index for index, code in enumerate(_CODES)}
