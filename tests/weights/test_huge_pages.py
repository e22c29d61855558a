"""Large values, whose memory is in huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from amp_fx.weights.cpu import huge_pages
from amp_fx.weights.cpu.huge_pages import HUGE_PAGE, in_huge_pages
from amp_fx.weights.store import STORE
from tests import needs

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LINUX = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SWITCH.exists() or "[never]" in SWITCH.read_text(),
    reason="this system has no transparent huge pages",
)
DTYPES = (torch.bfloat16, torch.float32, torch.int64)

SHARED = [HealthCheck.function_scoped_fixture]
"""All examples may share the fixture: it sets the same value."""


@pytest.fixture
def small_values_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "HUGE_PAGE", mmap.PAGESIZE)
    monkeypatch.setattr(huge_pages, "round", lambda _: 1, raising=False)


def mapped(tensor: torch.Tensor) -> dict[str, int]:
    """KiB of each kind in the mapping that holds a tensor; empty if there is none."""
    found: dict[str, int] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(text, 16) for text in match.groups())
            is_inside = start <= tensor.data_ptr() < end
        elif is_inside and line.endswith(" kB"):
            name, _, number = line.partition(":")
            found[name] = int(number.split()[0])
    return found


@settings(max_examples=50, deadline=None, suppress_health_check=SHARED)
@given(
    sizes=st.lists(st.integers(1, 7), max_size=4), order=st.randoms(), dtype=st.sampled_from(DTYPES)
)
@pytest.mark.usefixtures("small_values_count")
def test_a_copy_has_values_and_strides(sizes: list[int], order: object, dtype: torch.dtype) -> None:
    dims = [*range(len(sizes))]
    order.shuffle(dims)  # type: ignore[attr-defined]
    tensor = torch.arange(torch.Size(sizes).numel()).to(dtype).view(sizes).permute(dims)
    copy = in_huge_pages(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.dtype) == (tensor.stride(), dtype)
    assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(HUGE_PAGE // 2, dtype=torch.int8), id="small"),
        pytest.param(torch.ones(2, HUGE_PAGE, dtype=torch.int8)[:, ::2], id="with gaps"),
        pytest.param(torch.ones(1, dtype=torch.int8).expand(HUGE_PAGE), id="expanded"),
        pytest.param(torch.empty(HUGE_PAGE, device="meta"), id="no memory"),
        pytest.param(nn.Parameter(torch.ones(HUGE_PAGE)), id="subclass"),
    ],
)
def test_other_tensors_stay(tensor: torch.Tensor) -> None:
    assert in_huge_pages(tensor) is tensor


@LINUX
@pytest.mark.parametrize(("quarters", "num_pages"), [(3, 1), (4, 1), (5, 1), (7, 2), (40, 10)])
def test_memory_is_in_huge_pages_and_is_freed(quarters: int, num_pages: int) -> None:
    tensor = in_huge_pages(torch.ones(quarters * HUGE_PAGE // 4, dtype=torch.int8))
    address = tensor.data_ptr()
    kinds = mapped(tensor)
    assert kinds["AnonHugePages"] == num_pages * HUGE_PAGE // 1024
    assert kinds["Rss"] <= max(quarters / 4, num_pages) * HUGE_PAGE // 1024
    del tensor
    maps = Path("/proc/self/maps").read_text()
    assert not re.search(f"^{address:x}-", maps, re.MULTILINE)


@LINUX
@needs.FROZEN_GRAPHS
@torch.no_grad()
def test_large_values_are_in_huge_pages_also_after_a_write() -> None:
    model, x = nn.Linear(1100, 1100, bias=False), torch.randn(1, 1100)
    compiled = torch.compile(model, backend="amp_fx")
    for _ in range(3):
        model.weight.mul_(-1)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x).float()
        assert (compiled(x) - expected).abs().max() < 0.05
        [value] = [e.value for e in STORE.entries.values() if e.num_bytes > HUGE_PAGE]
        if value.layout is torch.strided:
            assert mapped(value)["AnonHugePages"] == HUGE_PAGE // 1024
