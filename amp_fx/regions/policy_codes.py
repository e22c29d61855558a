"""Carries a policy in autocast's own state: the private wire format of ``state``.

A region with a policy of the user's own must hold wherever a region of ``torch.autocast``
does: in eager code, in what Dynamo captures, in its guards, per thread, after exceptions.
All of that exists for the state of autocast, so the policy travels in it: two device types
that no tensor is ever on keep an autocast dtype each, and an unusual pair of dtypes there is
the number of a policy. Then

- a captured region is an ordinary ``_enter_autocast`` node, for a carrier,
- Dynamo's guard on the state of autocast recompiles when the policy changes,
- the state is thread-local, and autograd's threads inherit it.

A number is given back when nobody has the policy any more. Those under which Dynamo compiled
something stay: its guards know the policy by its number.
"""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import PolicyError

if TYPE_CHECKING:
    from amp_fx.policies.policy import Policy

    Codes = tuple[torch.dtype, ...]

# No package has ever offered "ipu" to this torch; "hpu" is Habana's.
_HAS_HPU = importlib.util.find_spec("habana_frameworks") is not None
CARRIERS = ("ipu", "xla" if _HAS_HPU else "hpu")
"""Device types whose autocast dtypes are codes. Whether they are enabled says nothing."""


def is_code(dtype: torch.dtype) -> bool:
    """Whether a carrier's dtype is (part of) the number of a policy."""
    return not (dtype.is_floating_point and dtype.itemsize > 1)


_CODES = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and is_code(d)}, key=str)
)
_INDEX = {code: index for index, code in enumerate(_CODES)}
MAX_POLICIES = len(_CODES) ** len(CARRIERS)

_lock = threading.Lock()
_numbers: weakref.WeakKeyDictionary[Policy, int] = weakref.WeakKeyDictionary()
_policies: list[weakref.ref[Policy]] = []
"""By number."""
_free: deque[int] = deque()
"""Numbers of policies that are gone; those that have been free for longest are given out first."""
_pinned: dict[int, Policy] = {}


def interned(policy: Policy) -> Policy:
    """The one of all equal policies that has a number, for as long as somebody holds it."""
    with _lock:
        number = _numbers.get(policy)
        found = None if number is None else _policies[number]()
        return _number(policy) if found is None else found


def _number(policy: Policy) -> Policy:
    if len(_policies) < MAX_POLICIES:
        number = len(_policies)
        _policies.append(_reference(policy, number))
    elif _free:
        number = _free.popleft()
        _policies[number] = _reference(policy, number)
    else:
        raise PolicyError(f"more than {MAX_POLICIES} policies in one process")
    _numbers[policy] = number
    return policy


def _reference(policy: Policy, number: int) -> weakref.ref[Policy]:
    return weakref.ref(policy, lambda _: _free.append(number))


def pin(policy: Policy) -> None:
    """Keeps the number of an interned policy: compiled code knows it by that."""
    _pinned[_numbers[policy]] = policy


def codes_of(policy: Policy) -> Codes:
    """The dtypes of the carriers that stand for an interned policy."""
    quotient, remainder = divmod(_numbers[policy], len(_CODES))
    return _CODES[quotient], _CODES[remainder]


def policy_of(codes: Codes) -> Policy | None:
    """The policy that the dtypes of the carriers stand for; None if they stand for none."""
    if codes[0] not in _INDEX or codes[1] not in _INDEX:
        return None
    return _policies[_INDEX[codes[0]] * len(_CODES) + _INDEX[codes[1]]]()


def ambient_codes() -> Codes:
    """The dtypes of the carriers in the calling thread."""
    return tuple(torch.get_autocast_dtype(carrier) for carrier in CARRIERS)


def ambient_policy() -> Policy | None:
    """The policy of the innermost region of the calling thread that names one."""
    return policy_of(ambient_codes())
