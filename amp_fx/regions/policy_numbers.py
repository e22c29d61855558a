"""Numbers of policies.

Dynamo's guards compare constants, and nodes of a graph take constants as arguments: both refer to
a policy by its number. Equal policies share a number. A number is never used again.
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
    """Returns the one of all equal policies that has a number while it is alive."""
    with _lock:
        number = _numbers.get(policy)
        found = None if number is None else _policies.get(number)
        if found is not None:
            return found
        number = next(_next_number)
        _numbers[policy] = number
        _policies[number] = policy
        return policy


def number_of(policy: Policy) -> int:
    """Returns the number of an interned policy."""
    return _numbers[policy]


def policy_of(number: int) -> Policy:
    """Returns the policy that has a number; it must be alive."""
    return _policies[number]


def pin(policy: Policy) -> int:
    """Keeps a policy alive, because compiled code refers to its number; returns the number."""
    found = interned(policy)
    number = number_of(found)
    _pinned[number] = found
    return number
