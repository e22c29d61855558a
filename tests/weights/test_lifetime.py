"""Cached values live as long as their weights, within the limit, and affect nothing else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch

from amp_fx import weight_cache
from amp_fx.weights.store import STORE
from tests.weights.nets import (
    EVAL,
    TRAIN,
    Net,
    assert_same,
    autocast,
    compile_amp_fx,
    counted_refreshes,
    inputs,
    make_net,
)

COPY_BYTES = 2 * (16 + 4 + 16)


def copies() -> list[weakref.ref[torch.Tensor]]:
    """Returns the copies that are kept now."""
    return [weakref.ref(entry.value) for entry in STORE.entries.values()]


def called(net: Net) -> Any:
    compiled = compile_amp_fx(net)
    with torch.no_grad():
        compiled(inputs())
        compiled(inputs())
    return compiled


def test_addresses_stay_over_optimizer_steps() -> None:
    net = make_net()
    compiled = compile_amp_fx(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    addresses = set()
    for _ in range(4):
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            compiled(inputs())
        addresses.add(tuple(entry.value.data_ptr() for entry in STORE.entries.values()))
    assert len(addresses) == 1
    assert len(addresses.pop()) == 3


def test_stale_copies_are_refreshed_together() -> None:
    net = make_net()
    compiled = called(net)
    for parameter in net.parameters():
        parameter.data.mul_(2)
    with torch.no_grad(), torch.profiler.profile() as profile, counted_refreshes() as num_refreshes:
        compiled(inputs())
        compiled(inputs())
        assert num_refreshes() == 3
    events = [event.name for event in profile.events() or ()]
    assert events.count("amp_fx::refresh") == 1
    assert events.count("aten::_foreach_copy_") == 1


def test_deleting_the_model_frees_the_copies() -> None:
    net = make_net()
    compiled = called(net)
    kept = copies()
    assert len(kept) == 3
    del net, compiled
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert weight_cache.stats() == weight_cache.Stats(0, 0, 0, 0)


def test_deleting_one_of_two_models_of_one_graph_frees_its_copies() -> None:
    nets = [make_net(1), make_net(2)]
    compiled = compile_amp_fx(lambda model, x: model(x))
    with torch.no_grad():
        for net in nets:
            compiled(net, inputs())
    del net
    assert weight_cache.stats().entries == 6
    del nets[1]
    gc.collect()
    assert weight_cache.stats().entries == 3


def test_replacing_a_weight_frees_its_copy() -> None:
    net = make_net()
    compiled = called(net)
    kept = copies()
    net.a.weight = torch.nn.Parameter(net.a.weight.detach() * 2)
    with torch.no_grad():
        compiled(inputs())
    gc.collect()
    assert sum(ref() is None for ref in kept) == 1
    assert weight_cache.stats().entries == 3


def test_deepcopy_pickle_and_state_dict_hold_no_copies() -> None:
    net, plain = make_net(), make_net()
    called(net)
    torch.compile(plain, backend="eager")(inputs())  # Dynamo leaves a mark of its own
    clone = copy.deepcopy(net)
    assert weight_cache.stats().entries == 3
    assert_same(list(clone.parameters()), list(plain.parameters()))
    assert set(vars(net.a.weight)) == set(vars(plain.a.weight))
    assert len(pickle.dumps(net)) == len(pickle.dumps(plain))
    assert set(net.state_dict()) == set(plain.state_dict())
    sizes = []
    for model in (net, plain):
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        sizes.append(stream.tell())
    assert sizes[0] == sizes[1]


def test_invalidate_refreshes_once() -> None:
    net, rival = make_net(), make_net(1)
    compiled = [called(net), called(rival)]
    for target, num in ((net, 3), (compiled[0], 3), (net.a.weight, 1), (None, 6)):
        weight_cache.invalidate(target)
        with torch.no_grad(), counted_refreshes() as num_refreshes:
            for program in compiled * 2:
                program(inputs())
            assert num_refreshes() == num


def test_invalidate_refuses_other_things() -> None:
    with pytest.raises(TypeError, match="dict"):
        weight_cache.invalidate({})  # type: ignore[arg-type]


def test_clear_drops_and_calls_make_again() -> None:
    net, twin = make_net(), make_net()
    compiled = called(net)
    kept = copies()
    weight_cache.clear()
    assert [ref() for ref in kept] == [None] * 3
    assert weight_cache.stats().entries == 0
    EVAL.check(compiled, net, twin)
    assert weight_cache.stats().entries == 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("limit", [0, 31, 32, 40, 64, COPY_BYTES, 1000])
def test_limit(limit: int) -> None:
    """Copies that are alive count, whether the cache still lists them or not."""
    weight_cache.set_limit(limit)
    net, twin = make_net(), make_net()
    compiled, other = compile_amp_fx(net), compile_amp_fx(net.a)
    made: list[weakref.ref[torch.Tensor]] = []
    for _ in range(3):
        TRAIN.check(compiled, net, twin)
        with torch.no_grad():
            assert_same(other(inputs()), autocast(twin.a, inputs()))
        made += copies()
        assert weight_cache.stats().bytes <= limit
        alive = {id(low): low.nbytes for low in (ref() for ref in made) if low is not None}
        assert sum(alive.values()) <= limit
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)


def test_lowering_the_limit_drops_and_frees_copies_at_once() -> None:
    net, twin = make_net(), make_net()
    compiled = called(net)
    made = copies()
    weight_cache.set_limit(40)
    assert weight_cache.stats().bytes <= 40
    EVAL.check(compiled, net, twin)
    made += copies()
    alive = {id(low): low.nbytes for low in (ref() for ref in made) if low is not None}
    assert sum(alive.values()) <= 40


def test_limit_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="-1"):
        weight_cache.set_limit(-1)
