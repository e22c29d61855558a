"""All ops that write lists, as torch runs them and as CUDA would."""

from __future__ import annotations

import pytest
import torch

import amp_fx
from amp_fx.weights.watch import engine
from tests import needs
from tests.weights.cuda_like import cuda_like, list_writes, write_list
from tests.weights.nets import assert_same, random

pytestmark = needs.HOOK


def tensors() -> list[torch.Tensor]:
    """Returns two parts of a larger tensor, one of which is turned."""
    flat = random(40)
    return [flat[3:19].view(4, 4), flat[20:].view(4, 5).t()]


@pytest.mark.parametrize("name", list_writes())
def test_every_op_that_writes_a_list(name: str) -> None:
    """The emulation gives torch's numbers and leaves storages alone; kept values follow."""
    expected, written = tensors(), tensors()
    write_list(name, expected)
    keeps = [amp_fx.keep(torch.neg, tensor, verify="off") for tensor in written]
    before = [kept().clone() for kept in keeps]
    engine().watch_list_ops()  # in Python it is done for accelerators only
    with cuda_like():
        write_list(name, written)
    assert_same(written, expected)
    assert all(engine().watched(tensor) and tensor._version == 0 for tensor in written)
    found = [kept() for kept in keeps]
    assert_same(found, [-tensor for tensor in expected])
    assert not any(map(torch.equal, before, found)), "it must have written"


def test_it_is_undone_at_the_end() -> None:
    weight = torch.ones(4, 4)
    with cuda_like(), pytest.raises(ZeroDivisionError):
        _ = 1 / 0
    assert engine().watch(weight)
    torch._foreach_mul_([weight], 2.0)
    assert not engine().watched(weight)
