"""``python -m amp_fx audit``: the report, the page and the exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_fx.commands.cli import main
from amp_fx.numerics.audit.report import REPAIRS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

HERE = "tests.commands.test_audit"


def make_step(dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = nn.Linear(16, 16, dtype=dtype)

    def step(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    return step, (torch.randn(4, 16),)


def low_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return make_step(torch.bfloat16)


def test_a_sound_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{HERE}:make_step", "--optimizer", "AdamW"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("make_step.<locals>.step: 0 findings, loss ")
    assert "optimizer states" in printed


def test_findings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{HERE}:low_step", "--optimizer", "SGD", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    kinds = {finding["kind"] for finding in report["findings"]}
    assert kinds <= set(REPAIRS)
    assert "weights_low" in kinds
    fields = {"kind", "module", "source", "code", "message", "repair", "count"}
    assert all(set(finding) == fields for finding in report["findings"])
    use = {"what", "dtype", "module", "count", "num_bytes", "flops"}
    assert all(set(each) == use for each in report["uses"])


def test_findings_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{HERE}:low_step", "--optimizer", "SGD", "--markdown"]) == 1
    text = capsys.readouterr().out
    head, *lines = text.splitlines()
    assert head.startswith(r"**make\_step.\<locals\>.step**: 2 findings")
    assert sum(line.startswith(r"- **weights\_low: ") for line in lines) == 1
    rows = [line for line in lines if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {7}
    assert any(row.startswith("| parameters | bfloat16 | 2 | 544 B |") for row in rows)
    assert {"gradients", "products"} <= {row.split(" | ")[0].strip("| ") for row in rows}
