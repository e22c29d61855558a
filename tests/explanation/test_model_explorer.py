"""Node data for Model Explorer, against the fields that its ``node_data_builder`` defines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.explanation.model_explorer import node_data
from tests.models.explained import Attention, mlp

if TYPE_CHECKING:
    from pathlib import Path

    from torch.export import ExportedProgram

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

GRAPH: dict[str, Any] = {
    "results": dict,
    "name": str,
    "thresholds": list,
    "gradient": list,
    "hideInAggregatedStatsTable": bool,
    "hideInChildrenStatsTable": bool,
    "hideAggregatedStats": list,
    "showExpandedSummaryOnGroupNode": bool,
    "showLabelCountColumnsInChildrenStatsTable": bool,
}
"""``GraphNodeData`` of ai-edge-model-explorer 0.1.34. Only ``results`` is required."""

RESULT: dict[str, Any] = {"value": (int, float, str), "bgColor": str, "textColor": str}
"""``NodeDataResult``. Only ``value`` is required."""


@pytest.fixture
def program() -> ExportedProgram:
    return amp_fx.export(Attention().eval(), (torch.randn(2, 10, 64),), dtype="bf16")


def saved(explanation: amp_fx.Explanation, path: Path) -> dict[str, Any]:
    assert explanation.save(path, format="model-explorer") == path
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


def test_the_file_has_the_schema_and_the_nodes_of_the_program(
    program: ExportedProgram, tmp_path: Path
) -> None:
    """Model Explorer's adapter for exported programs names nodes after ``fx.Node.name``."""
    data = saved(amp_fx.explain(program), tmp_path / "x.json")
    assert all(isinstance(value, GRAPH[key]) for key, value in data.items())
    for result in data["results"].values():
        assert {"value"} <= {*result} <= {*RESULT}
        assert all(isinstance(value, RESULT[key]) for key, value in result.items())
        assert re.fullmatch("#[0-9a-f]{6}", result["bgColor"])
    names = {node.name for node in program.graph.nodes}
    assert {*data["results"]} == {
        node.name
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) or node.op == "output"
    }
    assert {*data["results"]} <= names


def test_values_are_dtypes_and_reasons(program: ExportedProgram, tmp_path: Path) -> None:
    results = saved(amp_fx.explain(program), tmp_path / "x.json")["results"]
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dtype = results[node.name]["value"].partition(":")[0]
            assert dtype == str(value.dtype).removeprefix("torch.")
    assert results["linear"]["value"] == "bfloat16: lower_precision_fp"
    colors = {result["value"].partition(":")[0]: result["bgColor"] for result in results.values()}
    assert len({*colors.values()}) == len(colors) > 1

    policy = amp_fx.preset("torch").with_modules({"0": "fp32"})
    record = amp_fx.explain(mlp(), policy=policy)(torch.randn(8, 16)).forward[0]
    values = [result["value"] for result in node_data(record)["results"].values()]
    assert "float32: fp32 (module '0')" in values


def test_other_formats(tmp_path: Path) -> None:
    explanation = amp_fx.explain(nn.Linear(4, 4))(torch.randn(2, 4))
    assert json.loads(explanation.save(tmp_path / "x.json").read_text()) == explanation.to_dict()
    with pytest.raises(OptionError, match=r"'json', 'model-explorer'"):
        explanation.save(tmp_path / "x.json", format="netron")


def test_several_graphs_are_rejected(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        torch._dynamo.graph_break()
        return x.relu()

    explanation = amp_fx.explain(program)(torch.randn(4))
    with pytest.raises(UnsupportedError, match="program has 2"):
        explanation.save(tmp_path / "x.json", format="model-explorer")
