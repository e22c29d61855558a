"""The printed table, and the printed differences between two explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.reports import printed
from tests.models.explained import CASES, gpt, mlp

if TYPE_CHECKING:
    from amp_fx.explanation.explanation import Explanation


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    make, args = CASES["gpt"]
    lines = printed(amp_fx.explain(make(), backward=True)(*args)._render(), width).splitlines()
    assert max(map(len, lines)) <= width


def test_layers_that_are_alike_are_one_row() -> None:
    text = printed(amp_fx.explain(gpt(3))(torch.zeros(2, 16, dtype=torch.long))._render(), 120)
    paths = [line for line in text.splitlines() if line.startswith("blocks.")]
    assert paths
    assert all(path.startswith("blocks.0-2") for path in paths)
    [attention] = [line for line in text.splitlines() if line.startswith("  scaled_dot")]
    assert attention.split()[1:4] == ["3", "bf16", "lower_precision_fp"]


def test_every_decision_has_its_reason() -> None:
    """Prints reasons for a table, a change to it, a disabled region, and an opaque region."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x.sin()
        return nn.functional.bilinear(torch.softmax(y @ y, -1), y, w)

    policy = amp_fx.Policy.default().with_ops({"softmax": "fp32"})
    explanation = amp_fx.explain(program, policy=policy)(torch.randn(8, 8), torch.randn(3, 8, 8))
    words = " ".join(str(explanation).split())
    assert "matmul: floating-point inputs go to bfloat16. Matrix products" in words
    assert "fp32 (op 'softmax')" in words
    assert "softmax: floating-point inputs go to float32" in words
    assert "sin: autocast is off in the region around it" in words
    assert "bilinear: not rewritten, runs under native autocast" in words


def in_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x.view(4, 16).t()[:, 1:] @ w).relu_()
    return y.unsqueeze(0).expand(2, 16, 8) + y


def test_views_are_shown_on_demand() -> None:
    x, w = torch.randn(8, 8), torch.randn(3, 8)
    explain, explain_all = (amp_fx.explain(in_views, all=shown) for shown in (False, True))
    few, every = ([line.split()[0] for line in _ops(e(x, w))] for e in (explain, explain_all))
    assert few == ["matmul", "relu_", "add"]
    assert every == ["view", "t", "getitem", *few[:2], "unsqueeze", "expand", "add"]
    assert "5 views not shown" in str(explain(x, w))
    assert "not shown" not in str(explain_all(x, w))


def _ops(explanation: Explanation) -> list[str]:
    lines = str(explanation).partition("why")[0].splitlines()
    return [line for line in lines[lines.index("(root)") :] if line.startswith("  ")]


def test_a_view_shares_memory_with_its_input() -> None:
    """Compares with eager code: the data pointers of inputs and outputs of nodes."""
    x, w = torch.randn(8, 8), torch.randn(3, 8)
    nodes = [n for n in amp_fx.explain(in_views)(x, w).nodes if n.kind == "op"]
    seen: list[bool] = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            pointers = [t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)]
            versions = [t._version for t in args if isinstance(t, torch.Tensor)]
            result = func(*args, **(kwargs or {}))
            is_same = versions == [t._version for t in args if isinstance(t, torch.Tensor)]
            seen.append(is_same and result.untyped_storage().data_ptr() in pointers)
            return result

    with Seen():
        in_views(x, w)
    assert [node.is_view for node in nodes] == seen


def test_in_a_notebook_print_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich would show the table at once, give back nothing, and find a coloured terminal."""
    explanation = amp_fx.explain(mlp())(torch.randn(8, 16))
    outside = str(explanation), explanation._repr_html_()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (str(explanation), explanation._repr_html_()) == outside
    assert "layer_norm" in str(explanation)


def test_devices_differ_where_their_tables_do() -> None:
    model, x = mlp(), torch.randn(8, 16)
    cpu = amp_fx.explain(model, dtype=torch.bfloat16)(x)
    cuda = amp_fx.explain(model, dtype=torch.bfloat16, device_type="cuda")(x)
    ours, theirs = (
        {(n.module, n.op, n.dtype, n.treatment) for n in e.nodes if n.kind == "op"}
        for e in (cpu, cuda)
    )
    assert ours ^ theirs == {
        ("2", "F.layer_norm", "bfloat16", "no policy"),
        ("2", "aten.layer_norm", "float32", "fp32"),
    }
    assert cuda.totals.casts_left - cpu.totals.casts_left == 2  # into the norm and out of it
