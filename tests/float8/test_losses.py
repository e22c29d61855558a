"""Small models learn in float8 what they learn in bfloat16."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.float8.losses import Transformer, ViT, train


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning")
@pytest.mark.parametrize(
    ("kind", "num_classes"), [(Transformer, 64), (ViT, 16)], ids=["transformer", "vit"]
)
def test_the_loss_falls_as_in_bfloat16(kind: Any, num_classes: int) -> None:
    low, float8 = (train(kind, policy, 0, 80) for policy in ("torch", "float8-tensorwise"))
    assert low < 0.97 * math.log(num_classes)
    assert float8 != low
    assert float8 == pytest.approx(low, rel=0.005)
