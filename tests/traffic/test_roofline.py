"""Step times by arithmetic: the figures of one model by hand, and what the command prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.traffic.__main__ import main
from tests.traffic.models import TINY
from tests.traffic.roofline import GPUS, operations, seconds, update_seconds

if TYPE_CHECKING:
    from pathlib import Path

H200 = GPUS["h200"]
GB = 10**9


def counted(num_bytes: int, extern_bytes: int = 0, **more: int) -> dict[str, int]:
    return {
        "num_bytes": num_bytes,
        "extern_bytes": extern_bytes,
        "num_launches": 10,
        "num_extern": 4,
        **more,
    }


def test_operations_are_those_of_the_products() -> None:
    """Two layers of 64 by 64 over 32 rows; a backward has two products for each."""
    forward = 2 * 2 * 32 * 64 * 64
    assert operations(TINY["mlp"], trains=False) == (forward, 2 * (64 * 64 + 64))
    assert operations(TINY["mlp"], trains=True)[0] == 3 * forward


def test_what_takes_longest_counts() -> None:
    at_80_percent = 4.8e12 * 0.8
    bytes_alone = seconds(counted(10 * GB, 2 * GB), 0, H200)
    assert bytes_alone == pytest.approx(10 * GB / at_80_percent)
    products = seconds(counted(10 * GB, 2 * GB), 693 * 10**12, H200)
    assert products == pytest.approx(8 * GB / at_80_percent + 1)
    launches = seconds(counted(0), 0, H200)
    assert launches == pytest.approx((10 + 4) * 2e-6)


def test_an_update_has_a_step_and_sums_of_gradients() -> None:
    call, parameters = counted(10 * GB), 10**9
    one = update_seconds(call, call, 1, (0, parameters), H200)
    four = update_seconds(call, call, 4, (0, parameters), H200)
    libraries = 4 * 2e-6
    assert one == pytest.approx((10 * GB + 40 * parameters) / (4.8e12 * 0.8) + libraries)
    moved = 4 * 10 * GB + (40 + 3 * 12) * parameters
    assert four == pytest.approx(moved / (4.8e12 * 0.8) + 4 * libraries)


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("native", "amp_fx", "amp_fx, further", "lean")
    row: dict[str, Any] = {
        "about": "MLP 4096, 8k rows",
        "device": "cuda",
        "totals": {name: counted(10 * GB) for name in names},
    }
    path = tmp_path / "bytes.json"
    path.write_text(json.dumps({"rows": [{**row, "mode": m} for m in ("training", "inference")]}))
    assert main(["roofline", str(path), "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "| MLP 4096, 8k rows | 0.39 | 1.00 | 1.00 | 1.00 | 1.00 |" in printed
    assert printed.count("MLP 4096") == 2


def test_a_file_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["roofline", "no/such/file.json"])
    assert error.value.code == 2
    assert "cannot be read" in capsys.readouterr().err
