"""Properties of torch that the shadow run relies on, each tested alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.observe.ops import below_everything, facts_of, number_of
from amp_fx.observe.storages import address_of
from amp_fx.torch_private.autograd import current_autograd_node, latest_sequence_number

aten = torch.ops.aten


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = current_autograd_node()
        number = latest_sequence_number() if node is None else number_of(node)
        self.seen.append((func.name(), number))
        return func(*args, **(kwargs or {}))


def test_an_op_and_its_backward_have_one_number() -> None:
    x = torch.randn(3, requires_grad=True)
    with Noting() as noting:
        y = x.exp()
        z = y.sin()
        torch.autograd.grad(z.sum(), x)
    ops = ("aten::exp", "aten::sin")
    numbers = {name: number for name, number in noting.seen if name in ops}
    assert number_of(y.grad_fn) == numbers["aten::exp"]
    assert number_of(z.grad_fn) == numbers["aten::sin"]
    backward = [number for name, number in noting.seen if name == "aten::mul.Tensor"]
    assert backward == [numbers["aten::sin"], numbers["aten::exp"]]


def test_a_write_in_place_is_followed_by_the_copy_of_what_it_overwrites() -> None:
    base = torch.randn(4, requires_grad=True)
    other = torch.randn(4, requires_grad=True)
    y = base * 1
    with Noting() as noting:
        y.mul_(other)
    [(clone, _), (write, number)] = noting.seen
    assert (clone, write) == ("aten::clone", "aten::mul_.Tensor")
    assert number_of(y.grad_fn) == number - 1
    whole = base * 1
    with Noting() as noting:
        whole[1:].mul_(2)
    assert number_of(whole.grad_fn) == noting.seen[-1][1] + 1
    assert whole.grad_fn is not None
    assert whole.grad_fn.name().endswith("CopySlices")


def test_addresses_and_references_of_storages() -> None:
    x = torch.randn(4)
    assert address_of(x[1:]) == address_of(x) != address_of(x.clone())
    reference = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
    address = address_of(x)
    assert not reference.expired()  # type: ignore[no-untyped-call]
    del x
    assert reference.expired()  # type: ignore[no-untyped-call]
    assert all(address_of(torch.randn(4)) != address for _ in range(100))


def test_nothing_is_seen_from_below() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu"), below_everything():
        y = x @ x
    assert (y.dtype, y.requires_grad) == (torch.float32, False)


def test_facts_of_ops() -> None:
    assert facts_of(aten.mm.default).writes == ()
    assert facts_of(aten.add_.Tensor).writes == ((0, "self"),)
    assert facts_of(aten.view.default).is_view
    assert not facts_of(aten._to_copy.default).is_view
    assert facts_of(aten.bernoulli_.float).is_random
    written = dict(facts_of(aten.native_batch_norm.default).writes)
    assert set(written.values()) == {"running_mean", "running_var"}
