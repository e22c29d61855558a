"""The command line's front: version, width of what is piped, what env and explain tell."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.commands.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"amp_fx {amp_fx.__version__}\n"
    assert "__version__" in amp_fx.__all__


NAMES = ("a_block_with_a_name_that_is_long", "an_inner_module_with_another_name_that_is_long")
LONG = ".".join(NAMES)


class WithALongName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAMES[0], nn.ModuleDict({NAMES[1]: nn.Linear(4, 4)}))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(LONG)(args[0]) + kwargs["bias"]


def named(model: nn.Module, hidden: torch.Tensor, bias: torch.Tensor) -> None:
    """The signature that a wrapper of ``forward`` has, as decorators leave it."""


def test_names_are_whole_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = amp_fx.explain(WithALongName())(torch.ones(2, 4), bias=torch.ones(4))
    monkeypatch.setenv("COLUMNS", "200")
    assert LONG in str(explanation)
    monkeypatch.setenv("COLUMNS", "60")
    assert LONG not in str(explanation)


def test_inputs_of_a_wrapped_forward_have_their_names() -> None:
    model = WithALongName()
    WithALongName.forward.__signature__ = inspect.signature(named)  # type: ignore[attr-defined]
    try:
        explanation = amp_fx.explain(model)(torch.ones(2, 4), bias=torch.ones(4))
    finally:
        del WithALongName.forward.__signature__  # type: ignore[attr-defined]
    found = {node.op for node in explanation.nodes if node.kind == "input"}
    assert found == {"hidden", "bias"}
