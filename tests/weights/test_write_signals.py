"""Each signal of the table reports the writes that the table lists."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.weights.cache_entry import computing_values
from amp_fx.weights.store import STORE
from amp_fx.weights.watch import engine
from amp_fx.weights.write_signals import CAUGHT_BY, DEVICES, install, is_capturing, is_watchable
from tests import needs
from tests.other_thread import compiling_elsewhere
from tests.weights.cuda_like import cuda_like, list_writes, write_list
from tests.weights.nets import make_net
from tests.weights.specs import cast_spec
from tests.weights.writes import write_called

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.weights.cache_entry import CacheEntry

pytestmark = needs.WATCH

ROOT = Path(__file__).resolve().parents[2]
SHAPE = 4, 4


def compiled_write(p: torch.Tensor) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="inductor")
    def write(p: torch.Tensor) -> None:
        p.mul_(1.5)

    write(p.detach())


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in-place op on the weight": lambda p: p.mul_(1.5),
    "in-place op on .data": lambda p: p.data.mul_(1.5),
    "foreach op on weights": lambda p: torch._foreach_mul_([p], 1.5),
    "foreach op on .data": lambda p: torch._foreach_mul_([p.data], 1.5),
    "fused op": lambda p: write_list("aten::_fused_adamw_", [p.detach()]),
    "compiled code (inductor, Triton launched through it)": compiled_write,
    "another tensor assigned to .data, or as the parameter": lambda p: setattr(
        p, "data", torch.ones(SHAPE)
    ),
    "pointer, NumPy array or DLPack alias taken since the latest call": lambda p: (
        p.detach().numpy().__imul__(1.5)
    ),
}
ELSEWHERE = {
    "optimizer step",  # below: it needs an optimizer
    "pointer, NumPy array or DLPack alias taken before the latest call",  # test_unseen_writes
}


def kept(p: torch.nn.Parameter) -> CacheEntry:
    """Returns a low-precision copy that was made just now."""
    entry = STORE.entry(cast_spec(p), (p,), "a test")
    assert entry is not None
    with computing_values():
        STORE.refresh([entry], [(p,)])
    assert entry.is_fresh()
    return entry


def lies_where(entry: CacheEntry, p: torch.nn.Parameter) -> bool:
    """Returns True if a weight has the storage that it had when its cast was computed."""
    return bool(entry.slot.matches((p,)))


def observed(entry: CacheEntry, p: torch.nn.Parameter, version: int) -> set[str]:
    """Returns the signals that can be told apart from outside."""
    found = set()
    if not lies_where(entry, p):
        found.add("place")
    elif not engine().watched(p):
        found.add("storage")
    if p._version != version:
        found.add("version")
    return found


def test_the_tests_name_every_kind_of_write() -> None:
    assert WRITES.keys() | ELSEWHERE == CAUGHT_BY.keys()
    assert all(set(caught) == set(DEVICES) for caught in CAUGHT_BY.values())
    unseen = {(k, d) for k, caught in CAUGHT_BY.items() for d in DEVICES if not caught[d]}
    assert unseen == {(list(CAUGHT_BY)[-1], device) for device in ("cuda", "xpu")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", WRITES)
def test_each_signal_tells_of_what_the_table_says(kind: str, device: str) -> None:
    """CUDA is the CPU with list ops that write as CUDA's do."""
    p = torch.nn.Parameter(torch.ones(SHAPE))
    entry, version = kept(p), p._version
    with cuda_like() if device == "cuda" else contextlib.nullcontext(), torch.no_grad():
        WRITES[kind](p)
    claimed = set(CAUGHT_BY[kind][device])
    seen = observed(entry, p, version)
    # The emulation raises no versions; CUDA's own foreach kernels do.
    told_apart = {"storage", "place"} if device == "cuda" else {"storage", "place", "version"}
    assert claimed & told_apart <= seen
    assert not entry.is_fresh()
    if "storage" not in claimed and "place" not in claimed:
        assert "storage" not in seen, "the emulation must hide what CUDA hides"


@pytest.mark.parametrize("is_compiling", [False, True])
def test_a_step_is_noticed_whatever_it_writes_with(is_compiling: bool) -> None:
    """Also while another thread compiles."""
    net, other = make_net(), make_net()
    steps = [write_called("optimizer_with_a_kernel_of_its_own")(each) for each in (net, other)]
    p = net.a.get_parameter("weight")
    entry, version = kept(p), p._version
    steps[1](0)  # of other weights
    torch._foreach_mul_([torch.ones(SHAPE)], 2.0)
    assert entry.is_fresh()
    with compiling_elsewhere() if is_compiling else contextlib.nullcontext():
        steps[0](0)
    assert not observed(entry, p, version)
    assert not entry.is_fresh()


def test_devices_on_which_writes_are_not_seen_keep_nothing() -> None:
    assert is_watchable(torch.nn.Parameter(torch.ones(2)))
    assert not is_watchable(torch.ones(2, device="meta"))
    assert not is_watchable(torch.ones(2).to_sparse())


def test_every_op_that_writes_a_list_has_a_kernel_in_front() -> None:
    install()
    found = set(engine().watched_list_ops())
    assert set(list_writes()) <= found
    assert "aten::_fused_adamw_" in found
    assert "aten::_foreach_copy_" in found


def test_captures_are_asked_of_cuda_only() -> None:
    """Builds without CUDA raise when asked, as other accelerators' users would find."""
    assert not is_capturing([torch.device("xpu:0"), torch.device("privateuseone:0")])
