"""``torch._lazy_clone`` of weights: the clone shares their memory until one of them is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import amp_fx
from tests import needs
from tests.weights.nets import assert_same, square

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [needs.HOOK]


def kept_of(w: torch.Tensor) -> amp_fx.Keep:
    kept = amp_fx.keep(lambda w: w * 2, w)
    kept()
    assert kept.is_fresh()
    return kept


CLONES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with_gradients": torch._lazy_clone,
    "detached": lambda w: torch._lazy_clone(w.detach()),
    "in_inference_mode": torch.inference_mode()(torch._lazy_clone),
    "of_a_part": lambda w: torch._lazy_clone(w[1:, ::2]),
}


@pytest.mark.parametrize("how", CLONES)
def test_a_clone_of_a_watched_weight(how: str) -> None:
    w = square()
    before = w.detach().clone()
    kept = kept_of(w)
    clone = CLONES[how](w)
    kept()
    assert "lazy clone" in kept.why_remade
    part = before[1:, ::2] if how == "of_a_part" else before
    assert torch._C._is_cow_tensor(clone)  # type: ignore[attr-defined]
    assert_same(clone.detach().clone(), part)
    assert clone.stride() == (w[1:, ::2] if how == "of_a_part" else w).stride()
    assert clone.requires_grad == (how in ("with_gradients", "of_a_part"))
    with torch.inference_mode():
        clone.mul_(3)
    assert_same(w.detach(), before)
    w.data.mul_(2)
    for _ in range(3):
        assert_same(kept(), before * 4)
    assert kept.is_fresh()
    assert not kept.why_remade


def test_memory_that_cannot_be_shared_is_copied() -> None:
    kept_of(square())
    array = torch.from_numpy(square().detach().numpy())
    clone = torch._lazy_clone(array)
    assert_same(clone, array)
    assert clone.data_ptr() != array.data_ptr()
