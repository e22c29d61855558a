"""Properties of torch that the compiled part relies on, and properties of the compiled part."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from amp_fx import csrc
from amp_fx.weights.cache_entry import computing_values
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.specs import cast_spec

if TYPE_CHECKING:
    from collections.abc import Callable

watch: Any = csrc.load()
pytestmark = needs.WATCH
ROOT = Path(__file__).resolve().parents[2]


def weight() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(4, 4))
    assert watch.watch(p)
    return p


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, 4), p),
    "matmul": lambda p: p @ p,
    "to": lambda p: p.to(torch.bfloat16),
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.detach().clone(),
    "deepcopy": copy.deepcopy,
    "print": repr,
    "source of a list": lambda p: torch._foreach_copy_([torch.empty(4, 4)], [p.detach()]),
    "view": lambda p: p.view(-1)[3:],
    "equal": lambda p: torch.equal(p, p),
    "tolist": lambda p: p.tolist(),
}


@pytest.mark.parametrize("read", READS)
def test_reads_are_no_writes(read: str) -> None:
    p = weight()
    READS[read](p)
    assert watch.watched(p)


@needs.HOOK
def test_a_watched_storage_is_as_any_other(tmp_path: Path) -> None:
    p = weight()
    assert not torch._C._is_cow_tensor(p)  # type: ignore[attr-defined]
    torch.save(p, tmp_path / "p")
    assert torch.equal(torch.load(tmp_path / "p"), p)
    p.untyped_storage().resize_(0)
    p.untyped_storage().resize_(64)
    p.data.fill_(3)
    p.share_memory_()  # type: ignore[no-untyped-call]
    assert p.sum().item() == 48


def test_storages_of_others_are_not_watched(tmp_path: Path) -> None:
    saved, raw = tmp_path / "weights", tmp_path / "raw"
    torch.save({"weight": torch.ones(4, 4)}, saved)
    raw.write_bytes(bytes(64))
    with raw.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 64)
    foreign = {
        "numpy": torch.from_numpy(np.ones((4, 4), dtype=np.float32)),
        "torch.load(mmap)": torch.load(saved, mmap=True)["weight"],
        "from_file": torch.from_file(str(raw), shared=True, size=16),
        "mmap": torch.frombuffer(mapped, dtype=torch.float32),
        "shared memory": torch.ones(4, 4).share_memory_(),  # type: ignore[no-untyped-call]
        "dlpack of NumPy": from_dlpack(np.ones((4, 4), dtype=np.float32)),
    }
    for name, tensor in foreign.items():
        assert not watch.watch(tensor), name
        assert tensor.sum().item() in (0, 16)


def test_an_alias_has_the_bytes_and_the_version_and_is_asked_in_the_weights_place() -> None:
    p = weight()
    alias = watch.alias(p)
    assert alias.data_ptr() == torch._C._data_address(p)  # type: ignore[attr-defined]
    assert watch.watched(p)
    with torch.no_grad():
        p.mul_(2)
    assert torch.equal(alias, p)
    assert alias._version == p._version == 1
    assert not alias.requires_grad


def test_an_alias_keeps_the_bytes_alive() -> None:
    p = weight()
    alias = watch.alias(p)
    del p
    gc.collect()
    others = [torch.zeros(4, 4) for _ in range(100)]
    assert alias.sum().item() == 16
    del others


@needs.HOOK
def test_threads_may_watch_and_write_at_once() -> None:
    """Copy-on-write storages end in an internal assertion, or in freed memory, here."""
    p = torch.nn.Parameter(torch.ones(64))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            p.data.fill_(1)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        watch.watch(p)
    stop.set()
    for thread in threads:
        thread.join()
    assert watch.watch(p)
    p.data.fill_(2)
    assert not watch.watched(p)


def kept_copy() -> Any:
    """Returns a weight and the cache slot of its cast."""
    p = torch.nn.Parameter(torch.ones(4, 4))
    entry = STORE.entry(cast_spec(p), (p,), "a test")
    assert entry is not None
    with computing_values():
        STORE.refresh([entry], [(p,)])
    return p, entry.slot


def test_a_value_is_free_unless_something_holds_it() -> None:
    _, kept = kept_copy()
    assert watch.reusable((kept,)) == [kept.value]
    value = kept.value
    assert watch.reusable((kept,)) == [None]
    view = value.view_as(value)
    del value
    assert watch.reusable((kept,)) == [None]
    del view
    graph = watch.GraphCache((), (), 0, False)
    graph.begin()  # compiled code may read the value, though no Python object refers to it
    assert watch.reusable((kept,)) == [None]
    graph.leave()
    assert watch.reusable((kept,)) == [kept.value]


def test_code_is_not_used_after_a_value_that_it_is_bound_to_was_replaced() -> None:
    """A value that another graph has computed again is fresh, but not in this code."""
    p, slot = kept_copy()
    graph, code, held = watch.GraphCache((0,), (), 1, False), object(), slot.value
    graph.remember((slot,), STORE.of_weight(p), code)
    assert graph.enter((p,)) == (code, [])
    graph.leave()
    p.data.mul_(2)
    with computing_values():
        STORE.refresh(STORE.of_weight(p), [(p,)])
    assert slot.value is not held
    assert graph.enter((p,)) is None


def test_an_object_of_its_storage_that_nobody_holds_reads_no_value() -> None:
    _, kept = kept_copy()
    storage = kept.value.untyped_storage()  # torch keeps Python's object of it from here on
    assert watch.reusable((kept,)) == [None]
    del storage
    assert watch.reusable((kept,)) == [kept.value]


@pytest.mark.parametrize("is_view", [True, False])
def test_a_value_is_not_free_while_a_backward_holds_it(is_view: bool) -> None:
    """An op saves its inputs as they are: no second tensor over the storage need exist."""
    _, kept = kept_copy()
    x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    used = kept.value.view_as(kept.value) if is_view else kept.value
    out = x @ used
    del used
    assert watch.reusable((kept,)) == [None]
    del out
    assert watch.reusable((kept,)) == [kept.value]


SWITCHED_OFF = """
import torch, amp_fx
from amp_fx import weight_cache
from amp_fx.weights.watch import engine
from tests.weights.machine import KEEP, Session
assert engine() is None
ways = "eval", "train", "packed", KEEP
for write in ("everything", "numpy_backed"):
    session = Session("layers", write)
    session.run(3 * [("call", *ways, *ways), ("write", write)])
stats = weight_cache.stats()
assert (stats.entries, stats.bytes, stats.hits, stats.refreshes) == (0, 0, 0, 0), stats
weight = torch.nn.Parameter(torch.ones(4))
kept = amp_fx.keep(lambda w: w * 2, weight)
kept()
assert not kept.is_fresh() and kept.bytes == 0
assert "could not be built" in kept.why_remade, kept.why_remade
kept.invalidate()
assert not kept().requires_grad
try:
    amp_fx.keep(lambda w: w.t(), weight)()
except amp_fx.errors.OptionError:
    pass
else:
    raise AssertionError("a view of a weight is refused without the compiled part, too")
weight_cache.invalidate()
weight_cache.clear()
weight_cache.set_limit(1)
print("right")
"""


@pytest.mark.slow
def test_without_the_compiled_part_nothing_is_kept_and_all_is_right() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWITCHED_OFF],
        cwd=ROOT,
        env=os.environ | {csrc.SWITCH: "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["right"]


def test_what_cannot_be_built_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "watch.cpp"
    broken.write_text("no C++")
    monkeypatch.setattr(csrc, "SOURCE", broken)
    monkeypatch.setattr(csrc._state, "started", {})  # another test may have begun to build
    assert csrc.load.__wrapped__() is None
