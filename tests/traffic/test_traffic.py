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
from amp_fx.tables.float8 import RECIPES
from tests.traffic.__main__ import main
from tests.traffic.models import CASES, TINY, Case
from tests.traffic.pretend import can_pretend
from tests.traffic.totals import Totals, refresh_launches
from tests.traffic.worker import AMP_FX, FROZEN, LEAN, LIMIT, NATIVE, count

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")

on_cuda_builds = pytest.mark.skipif(not can_pretend(), reason="needs a CUDA build with Triton")


def count_on_cpu(
    contender: str, *, trains: bool, case: Case = TINY["product"]
) -> tuple[Totals, Totals]:
    return count(case, contender, device="cpu", dtype=torch.bfloat16, trains=trains)


X = Y = 32 * 64
W = 64 * 64
"""Elements of the input, the output and the weight of ``product``."""


def test_bytes_of_one_product_are_those_by_hand() -> None:
    casts, product = (4 + 2) * (X + W), 2 * (X + W + Y)
    assert count_on_cpu(NATIVE, trains=False)[0].num_bytes == casts + product
    first, further = count_on_cpu(AMP_FX, trains=False)
    assert first.num_bytes == casts + product
    assert further.num_bytes == casts + product - 6 * W
    assert (further.num_launches, further.num_casts, further.num_extern) == (1, 1, 1)
    assert count_on_cpu(LIMIT, trains=False)[0].num_bytes == product


def test_what_is_saved_for_the_backward() -> None:
    """Saves the low input of a product; native also saves the low weight."""
    native, ours = (count_on_cpu(name, trains=True)[1].saved_bytes for name in (NATIVE, AMP_FX))
    assert (native - ours, ours) == (2 * W, 2 * X)


@on_cuda_builds
def test_a_frozen_product_makes_its_low_weight_once(tmp_path: Path) -> None:
    arguments = ("product", "--tiny", "--mode", "inference", "--contenders", FROZEN)
    [row] = rows_on_cuda(tmp_path, *arguments)
    first, further = (Totals(**row["totals"][name]) for name in (FROZEN, f"{FROZEN}, further"))
    assert further.num_bytes == (4 + 2) * X + 2 * (X + W + Y)
    assert (further.num_launches, further.num_casts, further.num_extern) == (1, 1, 1)
    assert first.num_bytes == further.num_bytes + (4 + 2) * W
    assert first.num_refreshes == 1


@pytest.mark.slow
def test_what_ranks_send_is_that_by_hand() -> None:
    """Counts one of two ranks, which sends its halves of two weights in each of two blocks."""
    elements = 2 * 2 * (4 * 32 * 32) // 2
    sent = {
        contender: count_on_cpu(contender, trains=False, case=TINY["gathered"])[0].wire_bytes
        for contender in (NATIVE, AMP_FX, LIMIT)
    }
    assert sent == {NATIVE: 4 * elements, AMP_FX: 2 * elements, LIMIT: 2 * elements}
    assert not torch.distributed.is_initialized()


class Transposed(nn.Module):
    """Something that is copied into another layout, and not cast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Copies the input into another layout."""
        return x.transpose(0, 1).contiguous()


def test_a_copy_into_another_layout_is_told_from_a_cast() -> None:
    found, _ = count_on_cpu(NATIVE, trains=False, case=Case("copies", Transposed, (32, 64)))
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


def rows_on_cuda(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Returns the rows of a separate process, which pretends that there is a GPU."""
    path = folder / "out.json"
    command = [sys.executable, "-m", "tests.traffic", "bytes", *arguments, "--device", "cuda"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, "--json", str(path)], check=True, env=environment)
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
    found = rows_on_cuda(tmp_path, "mlp", "unet", "--tiny")
    assert len(found) == 4
    for row in found:
        check(row)


@on_cuda_builds
def test_a_weight_that_a_kernel_reads_whole_is_cast_there_in_training(tmp_path: Path) -> None:
    """Caches the cast only without gradients, where a call after a write refreshes it.

    A refresh runs op by op, so the first call in inference may move more bytes than native code.
    """
    weight = 256 * 256
    names = (NATIVE, AMP_FX, f"{AMP_FX}, further")
    training, inference = (
        [Totals(**row["totals"][name]) for name in names]
        for row in rows_on_cuda(tmp_path, "norm", "--tiny")
    )
    native, first, further = training
    assert first == further
    assert first.num_bytes <= native.num_bytes
    assert first.num_launches == native.num_launches
    native, _, further = inference
    assert further.num_bytes <= native.num_bytes - 2 * weight


@on_cuda_builds
def test_frozen_projections_are_one_product_on_cuda(tmp_path: Path) -> None:
    """Merges three projections, and two halves of the feed-forward network, in both blocks."""
    [row] = rows_on_cuda(tmp_path, "llama", "--tiny", "--mode", "inference")
    check(row)
    further, frozen = (row["totals"][f"{name}, further"] for name in (AMP_FX, FROZEN))
    assert further["num_extern"] - frozen["num_extern"] == 2 * (2 + 1)
    assert row["totals"][FROZEN]["num_bytes"] > frozen["num_bytes"]


@on_cuda_builds
def test_frozen_blocks_share_no_zeros_and_repeat_no_weights_on_cuda(tmp_path: Path) -> None:
    """Mamba2 concatenates zeros in each block; in Whisper a weight has a stride of 0."""
    for row in rows_on_cuda(tmp_path, "mamba", "whisper", "--mode", "inference"):
        further, frozen = (row["totals"][f"{name}, further"] for name in (AMP_FX, FROZEN))
        for name in ("num_bytes", "num_launches", "num_layouts"):
            assert frozen[name] <= further[name], (row["about"], name)


@on_cuda_builds
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_never_more_than_native_on_cuda_in_any_case(tmp_path: Path, dtype: str) -> None:
    found = rows_on_cuda(tmp_path, "--dtype", dtype)
    assert len(found) == 2 * len(CASES)
    for row in found:
        check(row)


@on_cuda_builds
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "native", "limit", "share"),
    [
        ("gpt2", 3423, 2817, 0.86),
        ("vit", 5133, 4288, 0.86),
        ("unet", 2776, 2388, 0.86),
        ("llama", 10907, 8611, 0.90),
        ("resnet", 2350, 2076, 0.91),
    ],
)
def test_figures_of_the_documentation(
    tmp_path: Path, case: str, native: int, limit: int, share: float
) -> None:
    """Counts MiB of forward and backward in the first call, and what ``lean`` moves of native's."""
    [row] = rows_on_cuda(tmp_path, case, "--mode", "training")
    moved = {name: row["totals"][name]["num_bytes"] for name in (NATIVE, LIMIT, LEAN)}
    assert round(moved[NATIVE] / 2**20) == native
    assert round(moved[LIMIT] / 2**20) == limit
    assert moved[LEAN] <= share * moved[NATIVE]


@on_cuda_builds
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_float8_moves_no_more_than_compiled_torchao(tmp_path: Path, name: str, recipe: str) -> None:
    """Compares bytes, kernels, and saved bytes after the weights are quantized."""
    pytest.importorskip("torchao", reason="the other one is torchao 0.18")
    contenders = (f"float8-{recipe}", f"torchao-{recipe}")
    arguments = ("--mode", "training", "--contenders", *contenders)
    [row] = rows_on_cuda(tmp_path, name, *arguments)
    assert not row["failures"]
    ours, theirs = (row["totals"][f"{contender}, further"] for contender in contenders)
    kernels, most = (w["num_launches"] + w["num_extern"] for w in (ours, theirs))
    assert kernels <= most
    assert ours["num_bytes"] <= theirs["num_bytes"]
    assert ours["saved_bytes"] <= theirs["saved_bytes"]
