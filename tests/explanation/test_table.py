"""What a person reads: the table, and what differs between two explanations."""

from __future__ import annotations

import pytest
import torch

import amp_fx
from amp_fx.explanation.table import folded_path, render
from amp_fx.reports import human, printed
from tests.models.explained import CASES, gpt, mlp


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    make, args = CASES["gpt"]
    lines = printed(render(amp_fx.explain(make(), backward=True)(*args)), width).splitlines()
    assert max(map(len, lines)) <= width


def test_layers_that_are_alike_are_one_row() -> None:
    text = printed(render(amp_fx.explain(gpt(3))(torch.zeros(2, 16, dtype=torch.long))), 120)
    rows = [line.split() for line in text.splitlines() if line.startswith("blocks.")]
    assert rows
    assert all(row[0].startswith("blocks.0-2") for row in rows)
    [attention] = [row for row in rows if row[1] == "scaled_dot_product_attention"]
    assert attention[2:5] == ["3", "bf16", "lower_precision_fp"]
    assert attention[6] == "kB"


def test_in_a_notebook_it_is_html() -> None:
    html = amp_fx.explain(mlp())(torch.randn(8, 16))._repr_html_()
    assert html.startswith("<pre")
    assert "layer_norm" in html


def test_in_a_notebook_print_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich would show the table at once, give back nothing, and find a coloured terminal."""
    explanation = amp_fx.explain(mlp())(torch.randn(8, 16))
    diff = explanation.diff(amp_fx.explain(mlp(), dtype=torch.float16)(torch.randn(8, 16)))
    outside = str(explanation), str(diff), explanation._repr_html_()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (str(explanation), str(diff), explanation._repr_html_()) == outside
    assert "layer_norm" in str(explanation)


def test_a_changed_policy_is_told_from_its_preset() -> None:
    model, x = mlp(), torch.randn(8, 16)
    changed = amp_fx.Policy.default().with_modules({"3": "fp32"})
    plain, other = amp_fx.explain(model)(x), amp_fx.explain(model, policy=changed)(x)
    assert plain.diff(other).names == ("torch cpu bfloat16", "torch, changed cpu bfloat16")
    assert "policy 'torch, changed'" in str(other)


def test_devices_differ_where_their_tables_do() -> None:
    model, x = mlp(), torch.randn(8, 16)
    options = {"weight_cache": "training"}  # as CUDA has it by default
    cpu = amp_fx.explain(model, dtype=torch.bfloat16, options=options)(x)
    cuda = amp_fx.explain(model, dtype=torch.bfloat16, device_type="cuda")(x)
    diff = cpu.diff(cuda)
    [norm] = diff.nodes
    assert (norm.module, norm.op) == ("2", "layer_norm")
    assert norm.dtypes == ("bfloat16", "float32")
    assert norm.treatments == ("unlisted", "fp32")
    left, right = diff.totals["casts_left"]
    assert right - left == 2  # into the norm and out of it
    assert "layer_norm" in str(diff)
    assert diff.to_dict()["nodes"][0]["dtypes"] == ["bfloat16", "float32"]


def test_no_difference_is_none() -> None:
    model, x = mlp(), torch.randn(8, 16)
    diff = amp_fx.explain(model)(x).diff(amp_fx.explain(model)(x))
    assert not diff
    assert str(diff) == "no difference"


def test_paths_of_several_modules() -> None:
    assert folded_path(["layers.0.a", "layers.1.a", "layers.3.a"]) == "layers.0-1,3.a"
    assert folded_path(["head"]) == "head"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB")]
)
def test_numbers_with_prefixes(number: int, text: str) -> None:
    assert human(number) == text
