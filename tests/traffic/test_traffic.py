"""``python -m tests.traffic bytes``: what generated kernels move, native beside ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests.traffic.__main__ import COLUMNS, main
from tests.traffic.models import CASES, TINY, Case
from tests.traffic.pretend import can_pretend
from tests.traffic.totals import Totals, refresh_launches, totals
from tests.traffic.worker import AMP_FX, FROZEN, LEAN, LIMIT, MARK, NATIVE, count

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")

on_cuda_builds = pytest.mark.skipif(not can_pretend(), reason="needs a CUDA build with Triton")


@pytest.fixture(autouse=True)
def _unpatched() -> Any:
    """Checks that counting restores all functions that it replaces."""
    from torch._inductor import compile_fx, scheduler

    from amp_fx.backend import lower
    from amp_fx.weights.call import CachedCall

    places: list[tuple[Any, str]] = [
        (compile_fx, "compile_fx_inner"),
        (scheduler.Scheduler, "codegen"),
        (CachedCall, "__call__"),
        (lower, "compile_packed"),
        (lower, "constants_for"),
    ]
    before = [getattr(place, name) for place, name in places]
    yield
    assert [getattr(place, name) for place, name in places] == before


def linear(size: int = 64) -> Case:
    """Returns one product without a bias: everything that it moves is known."""
    return Case("one product", lambda: nn.Linear(size, size, bias=False), (32, size))


def count_on_cpu(contender: str, *, trains: bool, case: Case | None = None) -> dict[str, Any]:
    return count(case or linear(), contender, device="cpu", dtype=torch.bfloat16, trains=trains)


def test_bytes_of_one_product_are_those_by_hand() -> None:
    x, w, y = 32 * 64, 64 * 64, 32 * 64
    casts = (4 + 2) * (x + w)
    product = 2 * (x + w + y)
    native = count_on_cpu(NATIVE, trains=False)
    assert totals(native["first"], native["refreshed"], "cpu").num_bytes == casts + product
    ours = count_on_cpu(AMP_FX, trains=False)
    assert totals(ours["first"], ours["refreshed"], "cpu").num_bytes == casts + product
    kept = totals(ours["further"], [], "cpu")
    assert kept.num_bytes == casts + product - 6 * w
    assert (kept.num_launches, kept.num_casts, kept.num_extern) == (1, 1, 1)
    limit = count_on_cpu(LIMIT, trains=False)
    assert totals(limit["first"], [], "cpu").num_bytes == product


def test_what_is_saved_for_the_backward() -> None:
    """Saves the low input of a product; native also saves the low weight."""
    native = totals(count_on_cpu(NATIVE, trains=True)["first"], [], "cpu")
    ours = totals(count_on_cpu(AMP_FX, trains=True)["further"], [], "cpu")
    assert native.saved_bytes - ours.saved_bytes == 2 * 64 * 64
    assert ours.saved_bytes == 2 * 32 * 64


def frozen_in_a_process_of_its_own() -> dict[str, Any]:
    """Counts as above; once inductor has its patterns for packed weights, it keeps them."""
    program = (
        "import json; from tests.traffic import test_traffic as here;"
        "print(json.dumps(here.count_on_cpu(here.FROZEN, trains=False)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_frozen_product_makes_its_low_weight_once() -> None:
    x, w, y = 32 * 64, 64 * 64, 32 * 64
    frozen = frozen_in_a_process_of_its_own()
    first = totals(frozen["first"], frozen["refreshed"], "cpu")
    further = totals(frozen["further"], [], "cpu")
    assert further.num_bytes == (4 + 2) * x + 2 * (x + w + y)
    assert (further.num_launches, further.num_casts, further.num_extern) == (1, 1, 1)
    assert first.num_bytes == further.num_bytes + (4 + 2) * w
    assert first.num_refreshes == 1


@pytest.mark.slow
def test_what_ranks_send_is_that_by_hand() -> None:
    """Counts one of two ranks, which sends its halves of two weights in each of two blocks."""
    elements = 2 * 2 * (4 * 32 * 32) // 2
    sent = {}
    for contender in (NATIVE, AMP_FX, LIMIT):
        found = count_on_cpu(contender, trains=False, case=TINY["gathered"])
        sent[contender] = totals(found["first"], found["refreshed"], "cpu").wire_bytes
    assert sent == {NATIVE: 4 * elements, AMP_FX: 2 * elements, LIMIT: 2 * elements}
    assert not torch.distributed.is_initialized()


class Transposed(nn.Module):
    """Something that is copied into another layout, and not cast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Copies the input into another layout."""
        return x.transpose(0, 1).contiguous()


def test_a_copy_into_another_layout_is_told_from_a_cast() -> None:
    case = Case("copies", Transposed, (32, 64))
    found = totals(count_on_cpu(NATIVE, trains=False, case=case)["first"], [], "cpu")
    assert (found.num_layouts, found.num_casts, found.num_launches) == (1, 0, 1)
    assert found.num_bytes == 2 * 4 * 32 * 64


@pytest.mark.parametrize(
    ("counts", "launches"),
    [
        ([1] * 64, 1),
        ([1] * 65, 2),
        ([320 * 65536 - 1], 1),
        ([320 * 65536], 1),  # by itself
        ([160 * 65536, 160 * 65536, 1], 2),
        ([200 * 65536] * 4, 3),
        ([], 0),
    ],
)
def test_launches_of_a_refresh(counts: list[int], launches: int) -> None:
    casts = [(size, 4, 2, True) for size in counts]
    assert refresh_launches(casts, "cuda") == launches
    assert refresh_launches([(size, 4, 2, False) for size in counts], "cuda") == len(counts)
    assert refresh_launches(casts, "cpu") == len(counts)


def check(row: dict[str, Any]) -> None:
    """Checks that two calls per write move no more than native's; in training, that one does."""
    assert not row["failures"], row["failures"]
    native, ours, further = (row["totals"][n] for n in (NATIVE, AMP_FX, "amp_fx, further"))
    is_inference = row["mode"] == "inference"
    for name in ("num_bytes", "num_launches", "num_extern", "num_casts", "num_layouts"):
        # Where native fuses the cast of a weight, the first call after a write moves more.
        mine = ours[name] + further[name] if is_inference else ours[name]
        theirs = native[name] * 2 if is_inference else native[name]
        assert mine <= theirs, (row["about"], name, ours[name], further[name], native[name])
        assert further[name] <= min(ours[name], native[name])
    assert ours["saved_bytes"] <= native["saved_bytes"]
    assert further["num_bytes"] < native["num_bytes"]
    assert row["totals"][LEAN]["num_bytes"] <= ours["num_bytes"]
    frozen = row["totals"].get(FROZEN)
    assert bool(frozen) == (row["device"] == "cuda" and row["mode"] == "inference")
    frozen = row["totals"].get(f"{FROZEN}, further")
    for name in ("num_bytes", "num_launches", "num_extern", "num_casts", "num_layouts"):
        assert frozen is None or frozen[name] <= further[name], (row["about"], name)


def rows(path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Returns the rows that a successful run writes."""
    assert main(["bytes", "--json", str(path), *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


@pytest.mark.slow
def test_never_more_than_native_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(tmp_path / "out.json", "mlp", "--tiny", "--device", "cpu")
    assert [row["mode"] for row in found] == ["training", "inference"]
    for row in found:
        check(row)
    lines = capsys.readouterr().out.splitlines()
    assert f"| {TINY['mlp'].about}, training, bfloat16, cpu |" in lines[0]
    assert f"{found[0]['totals'][NATIVE]['num_bytes'] / 2**20:.4g} |" in lines[2]


@pytest.mark.slow
def test_kept_copies_are_not_laid_out_again(tmp_path: Path) -> None:
    arguments = ("resnet", "--tiny", "--device", "cpu", "--mode", "training")
    [row] = rows(tmp_path / "out.json", *arguments)
    check(row)
    assert row["totals"]["amp_fx, further"]["num_layouts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_never_more_than_native_on_the_cpu_in_any_case(tmp_path: Path, dtype: str) -> None:
    found = rows(tmp_path / "out.json", "--device", "cpu", "--dtype", dtype)
    assert len(found) == 2 * len(CASES)
    for row in found:
        check(row)


@on_cuda_builds
def test_never_more_than_native_on_cuda(tmp_path: Path) -> None:
    found = rows(tmp_path / "out.json", "mlp", "unet", "--tiny", "--device", "cuda")
    assert len(found) == 4
    for row in found:
        check(row)


class AddsItsNorm(nn.Linear):
    """Its weight is read low by the product, and in float32 by a kernel that adds up squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product, and the norm of its weight."""
        out: torch.Tensor = super().forward(x) + self.weight.norm()
        return out


def totals_on_cuda(case: str, *, trains: bool) -> list[Totals]:
    """Counts a case of this module: native, and the first and a further call of amp_fx."""
    program = (
        "import json, sys; from tests.traffic.test_traffic import *;"
        "from tests.traffic.pretend import pretend_cuda; pretend_cuda();"
        f"case = Case('', lambda: {case}, (256, 256));"
        f"given = {{'device': 'cuda', 'dtype': torch.bfloat16, 'trains': {trains}}};"
        "print(json.dumps([count(case, name, **given) for name in (NATIVE, AMP_FX)]))"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    native, ours = json.loads(done.stdout.splitlines()[-1])
    first = [totals(found["first"], found["refreshed"], "cuda") for found in (native, ours)]
    return [*first, totals(ours["further"], [], "cuda")]


@on_cuda_builds
def test_a_weight_that_a_kernel_reads_whole_is_cast_there_in_training() -> None:
    """Caches the cast only without gradients, where a call after a write refreshes it."""
    weight = 256 * 256
    native, first, further = totals_on_cuda("AddsItsNorm(256, 256, False)", trains=True)
    assert first == further
    assert first.num_bytes <= native.num_bytes
    assert first.num_launches == native.num_launches
    native, first, further = totals_on_cuda("AddsItsNorm(256, 256, False)", trains=False)
    assert first.num_bytes <= native.num_bytes + 4 * weight
    assert further.num_bytes <= native.num_bytes - 2 * weight


@on_cuda_builds
def test_frozen_projections_are_one_product_on_cuda(tmp_path: Path) -> None:
    """Merges three projections, and two halves of the feed-forward network, in both blocks."""
    [row] = rows(tmp_path / "out.json", "llama", "--tiny", "--mode", "inference")
    check(row)
    further, frozen = (row["totals"][f"{name}, further"] for name in (AMP_FX, FROZEN))
    assert further["num_extern"] - frozen["num_extern"] == 2 * (2 + 1)
    assert row["totals"][FROZEN]["num_bytes"] > frozen["num_bytes"]


@on_cuda_builds
def test_frozen_blocks_share_no_zeros_and_repeat_no_weights_on_cuda(tmp_path: Path) -> None:
    """Mamba2 concatenates zeros in each block; in Whisper a weight has a stride of 0."""
    arguments = ("mamba", "whisper", "--mode", "inference", "--device", "cuda")
    for row in rows(tmp_path / "out.json", *arguments):
        further, frozen = (row["totals"][f"{name}, further"] for name in (AMP_FX, FROZEN))
        for name in ("num_bytes", "num_launches", "num_layouts"):
            assert frozen[name] <= further[name], (row["about"], name)


@on_cuda_builds
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_never_more_than_native_on_cuda_in_any_case(tmp_path: Path, dtype: str) -> None:
    found = rows(tmp_path / "out.json", "--device", "cuda", "--dtype", dtype)
    assert len(found) == 2 * len(CASES)
    for row in found:
        check(row)


@on_cuda_builds
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "native", "limit"), [("gpt2", 3423, 2817), ("resnet", 2350, 2076)]
)
def test_figures_of_another_harness_come_out(
    tmp_path: Path, case: str, native: int, limit: int
) -> None:
    """Compares with earlier counts in MiB: forward and backward in bfloat16, for an H200."""
    [row] = rows(tmp_path / "out.json", case, "--mode", "training", "--device", "cuda")
    assert round(row["totals"][NATIVE]["num_bytes"] / 2**20) == native
    assert round(row["totals"][LIMIT]["num_bytes"] / 2**20) == limit


@on_cuda_builds
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "share"),
    [("gpt2", 0.86), ("vit", 0.86), ("unet", 0.86), ("llama", 0.90), ("resnet", 0.91)],
)
def test_what_lean_saves_on_cuda(tmp_path: Path, case: str, share: float) -> None:
    """Compares with native's bytes in the first step after an update, forward and backward."""
    [row] = rows(tmp_path / "out.json", case, "--mode", "training", "--device", "cuda")
    assert row["totals"][LEAN]["num_bytes"] <= share * row["totals"][NATIVE]["num_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("nonsense",), ["nonsense", "gpt2"]), (("--dtype", "float64"), ["float64", "bfloat16"])],
)
def test_bad_arguments(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bytes", *arguments])
    printed = capsys.readouterr().err
    assert all(word in printed for word in words), printed


def test_a_worker_that_dies_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starts a worker that prints more than a pipe holds, one contender's figures, and an error."""
    counted = dict.fromkeys(("first", "further"), dict.fromkeys(COLUMNS, 1 << 20))
    program = (
        "import sys; sys.stderr.write('warning\\n' * 100_000 + 'no room left\\n');"
        f"print({MARK + json.dumps(counted)!r}); sys.exit(3)"
    )
    run = subprocess.run

    def start(_: list[str], **given: Any) -> Any:
        return run([sys.executable, "-c", program], **given)

    monkeypatch.setattr(subprocess, "run", start)
    assert main(["bytes", "mlp", "--tiny", "--device", "cpu", "--mode", "inference"]) == 1
    printed = capsys.readouterr().out
    assert "| native | 1 | 1048576 |" in printed
    assert "native failed" not in printed
    assert "limit failed: no room left" in printed


@pytest.mark.skipif(can_pretend(), reason="is a CUDA build")
def test_cuda_without_a_build_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bytes", "--device", "cuda"])
    assert "built without CUDA" in capsys.readouterr().err
