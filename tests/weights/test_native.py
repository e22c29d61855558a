"""What the compiled part relies on in torch, and what others rely on in it."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from amp_fx import native
from tests.weights.nets import compile_amp_fx, inputs, make_net

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

watch: Any = native.load()
pytestmark = pytest.mark.skipif(watch is None, reason="the compiled part cannot be built")
needs_hook = pytest.mark.skipif(
    watch is not None and not watch.has_hook, reason="torch has no hook on storages before 2.13"
)


def weight() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(4, 4))
    assert watch.watch(p)
    return p


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, 4), p),
    "to": lambda p: p.to(torch.bfloat16),
    "clone": lambda p: p.detach().clone(),
    "view": lambda p: p.view(-1)[3:],
    "equal": lambda p: torch.equal(p, p),
    "tolist": lambda p: p.tolist(),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "view of data": lambda p: p.data.view(-1)[3].fill_(2),
    "pointer": lambda p: p.data_ptr(),
    "numpy": lambda p: p.detach().numpy(),
    "dlpack": lambda p: from_dlpack(p.detach()),
    "storage": lambda p: p.untyped_storage().copy_(torch.ones(16).untyped_storage()),
    "out": lambda p: torch.add(p.detach(), 1, out=p.detach()),
}


@pytest.mark.parametrize("read", READS)
def test_reads_are_no_writes(read: str) -> None:
    p = weight()
    READS[read](p)
    assert watch.watched(p)


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writes_are_noticed_and_can_be_watched_again(write: str) -> None:
    p = weight()
    address = torch._C._data_address(p)  # type: ignore[attr-defined]
    for _ in range(2):
        WRITES[write](p)
        assert not watch.watched(p)
        assert watch.watch(p)
        assert watch.watched(p)
    assert torch._C._data_address(p) == address  # type: ignore[attr-defined]


@needs_hook
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


def test_storages_of_others_are_not_watched() -> None:
    assert not watch.watch(torch.from_numpy(np.ones(4, dtype=np.float32)))
    assert not watch.watch(torch.ones(4).share_memory_())  # type: ignore[no-untyped-call]


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


@needs_hook
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


@needs_hook
def test_a_call_that_only_compares_addresses_is_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs ask all static inputs for their addresses on every replay."""

    def compile_inner(gm: Any, example_inputs: Any, _: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        compiled = aot_eager(gm, list(example_inputs))

        def replay(*args: Any) -> Any:
            for arg in args:
                arg.data_ptr()
            return compiled(*args)

        return replay

    monkeypatch.setattr("amp_fx.backend.compile_inner", compile_inner)
    # As on accelerators: one variant, which is passed the weights for their gradients.
    monkeypatch.setattr("amp_fx.backend.slots_inside", lambda *_: ())
    from amp_fx import weight_cache

    weight_cache.clear()
    net = make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    for _ in range(10):
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
    assert weight_cache.stats().refreshes == 3


def test_without_a_compiler_there_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load.__wrapped__() is None


def test_what_cannot_be_built_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "watch.cpp"
    broken.write_text("no C++")
    monkeypatch.setattr(native, "SOURCE", broken)
    assert native.load.__wrapped__() is None
