"""Tells AOTAutograd's on-disk cache which policies hold, under whatever backend.

Its keys have the state of autocast and the regions of a graph, and with them the numbers that
carry policies (``policy_codes``). Those mean other policies in other processes, whose code must
not be taken. What this backend compiles has its casts in the graph, and needs none of it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import Guard, TracingContext

from amp_fx.regions.policy_codes import CARRIERS, ambient_policy, policy_of
from amp_fx.regions.state import in_disabled_region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.policies.policy import Policy

_ONLY_HERE = uuid.uuid4().hex
"""In keys of this process alone."""
_done: list[object] = []


def digest(policy: Policy | None) -> str:
    """Returns a key that identifies a policy in all processes.

    Rules are code, which changes under its name, and modules are no part of torch's keys: what
    was compiled under either is for this process alone, as it is for a policy that is gone.
    """
    if policy is None or policy.modules or policy.rules:
        return _ONLY_HERE
    tables = [
        (device, sorted((op, rule.value) for op, rule in table.items()))
        for device, table in sorted(policy.tables.items())
    ]
    return hashlib.sha256(f"{policy}\n{tables}".encode()).hexdigest()


def put_policies_in_keys() -> None:
    """Adds policies to the cache's keys from now on; does nothing if nothing is compiled.

    Relies on ``AOTAutogradCacheDetails`` of ``torch._functorch._aot_autograd.autograd_cache``:
    it is made of a graph in the thread that compiles it, and all its attributes are in the key.
    """
    if _done or "torch._dynamo" not in sys.modules:
        return
    _done.append(put_policies_in_keys)
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    init = AOTAutogradCacheDetails.__init__

    @functools.wraps(init)
    def init_with_policies(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        init(self, gm, *args, **kwargs)
        digests = [digest(policy) for policy in (*_around(), *_inside(gm))]
        if digests:
            self.amp_fx_policies = digests

    AOTAutogradCacheDetails.__init__ = init_with_policies  # type: ignore[method-assign]


def _around() -> Iterator[Policy]:
    """The policy of the calling thread; this backend compiles with autocast off."""
    policy = ambient_policy()
    if policy is not None and torch.is_autocast_enabled(CARRIERS[0]):
        yield policy


def _inside(gm: fx.GraphModule) -> Iterator[Policy | None]:
    """Policies of the regions that a graph enters; None for one that is gone."""
    codes: dict[str, torch.dtype] = {}
    graphs = [child.graph for child in gm.modules() if isinstance(child, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        if node.target is not torch.amp.autocast_mode._enter_autocast:
            continue
        if node.args[0] in CARRIERS:
            codes[node.args[0]] = node.args[1]
        if node.args[0] == CARRIERS[-1]:  # each region enters both, in order
            yield policy_of(tuple(codes[carrier] for carrier in CARRIERS))


def guard_disabled_region() -> None:
    """Makes Dynamo compile a frame anew where a disabled region is around it, or is no more.

    Its own guards compare which devices are on, and with which dtypes: none is, in both.

    Relies on ``torch._guards.Guard`` calling any function with the builder, whose
    ``guard_manager.root`` takes Python functions as guards, and on guards that are installed as
    long as the backend is being called.
    """
    if TracingContext.try_get() is None:  # called without Dynamo
        return
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    install_guard(
        Guard(GlobalStateSource(), partial(_disabled_region_match, expected=in_disabled_region()))
    )


def _disabled_region_match(builder: Any, guard: Guard, *, expected: bool) -> None:
    def is_as_expected(_: Any) -> bool:
        return in_disabled_region() is expected

    text = f"amp_fx.regions.state.in_disabled_region() is {expected}"
    builder.guard_manager.root.add_lambda_guard(is_as_expected, [text], guard.user_stack)
