"""policy_codes: numbers of policies are shared by equal ones, and are given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import Policy
from amp_fx.errors import PolicyError
from amp_fx.regions import kernels, policy_codes
from amp_fx.regions.policy_codes import MAX_POLICIES, ambient_policy, interned

f32 = torch.float32


def no_opinion_anew() -> Any:
    """A rule that is another function each time."""
    return lambda *_: None


def numbers_in_use() -> int:
    gc.collect()
    return len(policy_codes._numbers)


def test_a_new_rule_for_each_region_uses_nothing_up() -> None:
    in_use = numbers_in_use()
    for _ in range(MAX_POLICIES + 10):
        mine = Policy.default().with_rule(no_opinion_anew())
        with amp_fx.autocast("cpu", policy=mine):
            assert ambient_policy() is mine
    del mine
    assert numbers_in_use() == in_use


def test_policies_in_use_at_once_have_numbers_of_their_own_until_there_are_none() -> None:
    held: list[Policy] = []
    with pytest.raises(PolicyError, match="more than"):
        held.extend(
            interned(Policy.default().with_rule(no_opinion_anew())) for _ in range(MAX_POLICIES + 1)
        )
    held.extend(policy_codes._pinned.values())
    codes = {policy_codes.codes_of(policy) for policy in held}
    assert len(codes) == len(set(map(id, held)))
    gone = weakref.ref(held[0])
    del held[0]
    gc.collect()
    assert gone() is None
    last = Policy.default().with_rule(no_opinion_anew())
    assert interned(last) is last, "its number was given back"


def test_an_equal_policy_built_for_each_region_prepares_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build() -> Policy:
        return Policy.default().with_ops({"softmax": "fp32"}).with_modules({"a": "keep"})

    with amp_fx.autocast("cpu", policy=build()):
        pass
    remembered = len(kernels._prepared)
    monkeypatch.setattr(kernels, "_prepare_op", lambda *_: pytest.fail("prepared again"))
    policies = [weakref.ref(build()) for _ in range(3)]
    for _ in range(3):
        policy = build()
        policies.append(weakref.ref(policy))
        with amp_fx.autocast("cpu", policy=policy):
            pass
    del policy
    gc.collect()
    assert len(kernels._prepared) == remembered
    assert [found() for found in policies] == [None] * 6, "none is kept alive"


@pytest.mark.parametrize("backend", ["amp_fx", "eager"])
def test_a_policy_that_dynamo_compiled_under_keeps_its_number(backend: str) -> None:
    """Its guards know a policy by the number: another one must not get it."""
    policy = Policy.default().with_rule(lambda op, *_: "fp32" if op == "aten::linear" else None)
    linear = torch.compile(torch.nn.Linear(2, 2), backend=backend)
    with amp_fx.autocast("cpu", policy=policy):
        assert linear(torch.ones(1, 2)).dtype == f32
    found = weakref.ref(policy)
    del policy
    gc.collect()
    assert found() is not None


def test_a_checkpoint_keeps_the_policy_of_its_forward() -> None:
    """Its region is over, and nobody else has the policy, when it is computed again."""
    seen = []

    def rule(op: str, *_: Any) -> str | None:
        seen.append(op)
        return "fp32" if op == "aten::linear" else None

    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    with amp_fx.autocast("cpu", policy=Policy.default().with_rule(rule)):
        out = torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False)
    assert out is not None
    num_before = seen.count("aten::linear")
    gc.collect()
    out.sum().backward()
    assert out.dtype == f32
    assert seen.count("aten::linear") > num_before
