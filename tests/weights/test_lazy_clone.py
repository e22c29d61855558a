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
    kept_of(w)
    clone = CLONES[how](w)
    part = before[1:, ::2] if how == "of_a_part" else before
    assert torch._C._is_cow_tensor(clone)  # type: ignore[attr-defined]
    assert_same(clone.detach().clone(), part)
    assert clone.stride() == (w[1:, ::2] if how == "of_a_part" else w).stride()
    assert clone.requires_grad == (how in ("with_gradients", "of_a_part"))
    with torch.inference_mode():
        clone.mul_(3)
    assert_same(w.detach(), before)


@pytest.mark.parametrize("clones_first", [False, True])
def test_values_are_right_and_kept_again_after_a_write(*, clones_first: bool) -> None:
    w = square().detach()
    clone = torch._lazy_clone(w) if clones_first else None
    kept = amp_fx.keep(lambda w: w * 2, w)
    kept()
    clone = torch._lazy_clone(w) if clone is None else clone
    held = clone.clone()
    assert_same(kept(), held * 2)
    assert "lazy clone" in kept.why_remade
    clone.add_(1)
    assert_same(kept(), held * 2)
    w.add_(5)
    assert_same(clone, held + 1)
    for _ in range(3):
        assert_same(kept(), (held + 5) * 2)
    assert kept.is_fresh()
    assert not kept.why_remade
    w.data.mul_(2)
    assert not kept.is_fresh()


def test_a_weight_that_is_written_after_its_clone_died() -> None:
    """Writes a weight that keeps its address; only the missing watch reports the write."""
    w = square().detach()
    kept = kept_of(w)
    clone = torch._lazy_clone(w)
    kept()
    del clone
    w.mul_(3)
    assert_same(kept(), w * 2)


def test_memory_that_cannot_be_shared_is_copied() -> None:
    kept_of(square())
    array = torch.from_numpy(square().detach().numpy())
    clone = torch._lazy_clone(array)
    assert_same(clone, array)
    assert clone.data_ptr() != array.data_ptr()
