"""Exported programs explain themselves until they are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import OptionError
from tests.exporting.oracle import saved_and_loaded

if TYPE_CHECKING:
    from pathlib import Path

    from torch.export import ExportedProgram

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Model(nn.Module):
    """A low product, an unlisted op, a policy of float32, a region that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu().prod(-1, keepdim=True) * x
        with torch.autocast("cpu", enabled=False):
            found: Tensor = self.last(y.float())
            return found


@pytest.fixture
def program() -> ExportedProgram:
    return amp_fx.export(Model(), (torch.randn(4, 8),), dtype="bf16")


def test_ops_casts_and_reasons(program: ExportedProgram) -> None:
    found = amp_fx.explain(program)
    assert (found.model, found.device_type, found.dtype) == ("Model", "cpu", "bfloat16")
    ops = {node.op: node for node in found.nodes if node.kind == "op"}
    linear, last = (n for n in found.nodes if n.op == "aten.linear")
    assert (linear.module, linear.dtype, linear.decisions[0].policy) == (
        "first",
        "bfloat16",
        "lower_precision_fp",
    )
    assert (last.module, last.dtype, last.origin) == ("last", "float32", "region")
    assert (ops["aten.relu"].origin, ops["aten.prod.dim_int"].dtype) == ("unlisted", "float32")
    states = {(cast.weight or cast.source, cast.state) for cast in found.casts}
    assert ("first.weight", "removed") in states
    assert ("x", "inserted") in states
    weights = {n.op: n.outputs[0].dtype for n in found.nodes if n.kind == "weight"}
    assert weights == {
        "first.weight": "bfloat16",
        "first.bias": "bfloat16",
        "last.weight": "float32",
    }


def test_a_weight_that_is_stored_low_is_explained(program: ExportedProgram) -> None:
    assert "the weight is stored in bfloat16" in str(amp_fx.explain(program))


def test_files_contain_nothing_of_the_passes(program: ExportedProgram) -> None:
    loaded = saved_and_loaded(program)
    keys = {str(key) for node in loaded.graph.nodes for key in node.meta.get("custom") or ()}
    assert not [key for key in (*keys, *loaded.graph_module.meta) if "amp_fx" in key]


def test_of_another_program_what_export_would_make() -> None:
    model, x = Model(), torch.randn(4, 8)
    plain = torch.export.export(model, (x,))
    found = amp_fx.explain(plain, dtype="fp16")
    rewritten = amp_fx.explain(amp_fx.export(plain, dtype="fp16"))
    assert found.to_dict() == rewritten.to_dict()
    assert found.dtype == "float16"


def test_it_is_drawn(program: ExportedProgram, tmp_path: Path) -> None:
    amp_fx.draw(program, tmp_path / "program.dot")
    text = (tmp_path / "program.dot").read_text()
    assert "aten.linear" in text or "linear" in text
    assert "bfloat16" in text or "bf16" in text


def test_what_does_not_go_with_a_program(program: ExportedProgram) -> None:
    with pytest.raises(OptionError, match="exported program"):
        amp_fx.explain(program, backward=True)
