"""dtypes: names of a dtype mean the same everywhere that one is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import Policy
from amp_fx.commands.explain import parse_input
from amp_fx.dtypes import as_dtype
from amp_fx.errors import OptionError, RegionError
from amp_fx.options import Options
from amp_fx.regions.registered_ops import _checked_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "torch.half": torch.float16,
}


def of_backend(name: str) -> Any:
    options: dict[str, Any] = {"dtype": name, "output_dtype": "autocast", "compiler": "eager"}
    compiled = torch.compile(nn.Linear(4, 4), backend="amp_fx", options=options)
    return compiled(torch.ones(1, 4)).dtype


def of_compile(name: str) -> Any:
    compiled = amp_fx.compile(nn.Linear(4, 4), dtype=name, options={"compiler": "eager"})
    return compiled(torch.ones(1, 4)).dtype


def of_region(name: str) -> Any:
    with amp_fx.autocast("cpu", name):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def of_compiled_region(name: str) -> Any:
    def product(x: torch.Tensor) -> torch.Tensor:
        with amp_fx.autocast("cpu", name):
            return x @ x

    return torch.compile(product, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype


PLACES: dict[str, Callable[[str], Any]] = {
    "backend": of_backend,
    "compile": of_compile,
    "region": of_region,
    "compiled region": of_compiled_region,
    "explain": lambda name: getattr(
        torch, amp_fx.explain(nn.Linear(4, 4), dtype=name)(torch.ones(1, 4)).dtype
    ),
    "policy": lambda name: Policy.default("cuda", dtype=name).low_dtype("cuda"),
    "with_dtype": lambda name: Policy.default().with_dtype(name).low_dtype("cpu"),
    "policy file": lambda name: Policy.from_dict({"dtype": name}).low_dtype("cpu"),
    "input shape": lambda name: parse_input(f"2:{name.removeprefix('torch.')}").dtype,
    "register_device": lambda name: _checked_dtypes("privateuseone", [name])[0],
    "options": lambda name: Options.parse({"dtype": name}).dtype,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["bf16", "half"])
def test_every_place_takes_every_name(place: str, name: str) -> None:
    assert PLACES[place](name) is NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert as_dtype(name) is NAMES[name]


@pytest.mark.parametrize("value", ["load", "BF16", "nonsense", "", "torch.", 16, None, int])
def test_what_is_no_dtype(value: object) -> None:
    assert as_dtype(value) is None


def test_a_wrong_name_is_refused_with_those_that_are_right() -> None:
    with pytest.raises(RegionError, match=r"'bf17' is not a dtype: pass torch\.bfloat16"):
        amp_fx.autocast("cpu", "bf17")
    with pytest.raises(OptionError, match=r"'bf17' is not a dtype: pass torch\.bfloat16"):
        amp_fx.compile(nn.Linear(4, 4), dtype="bf17")
