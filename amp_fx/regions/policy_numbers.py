"""Numbers that identify policies.

Guards of Dynamo compare constants, and nodes of a graph have constant arguments, so both refer to a
policy by its number. Equal policies share a number. Numbers are never reused.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fx.policies.policy import Policy

_lock = threading.Lock()
_numbers: weakref.WeakKeyDictionary[Policy, int] = weakref.WeakKeyDictionary()
_policies: weakref.WeakValueDictionary[int, Policy] = weakref.WeakValueDictionary()
_next_number = itertools.count()
_pinned: dict[int, Policy] = {}
"""Policies that compiled code refers to."""


def interned(policy: Policy) -> Policy:
    """Returns the canonical instance of all equal policies; it has a number while it is alive."""
    with _lock:
        number = _numbers.get(policy)
        existing = None if number is None else _policies.get(number)
        if existing is not None:
            return existing
        number = next(_next_number)
        _numbers[policy] = number
        _policies[number] = policy
        return policy


def number_of(policy: Policy) -> int:
    """Returns the number of an interned policy."""
    return _numbers[policy]


def policy_of(number: int) -> Policy:
    """Returns the policy with a number; the policy must be alive."""
    return _policies[number]


def pin(policy: Policy) -> int:
    """Returns the number of a policy, and prevents the policy from being freed."""
    canonical = interned(policy)
    number = number_of(canonical)
    _pinned[number] = canonical
    return number
