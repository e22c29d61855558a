"""``torch.nn.TransformerEncoder`` in evaluation mode, whose layers are one op each."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import amp_fx
from tests import needs
from tests.parity import oracle
from tests.parity.oracle import Subject, Way

CASES: dict[str, dict[str, Any]] = {
    "relu": {},
    "gelu": {"activation": "gelu"},
    "norm first": {"norm_first": True},
    "causal": {"is_causal": True},
    "padded and causal": {"is_causal": True, "is_padded": True},
    "padded": {"is_padded": True},
}


class Encoder(nn.Module):
    def __init__(self, *, is_causal: bool = False, is_padded: bool = False, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, **options)
        # Eager autocast fails for the nested tensors of padded batches.
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)
        self.options: dict[str, Any] = {}
        if is_causal:
            mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
            self.options = {"mask": mask, "is_causal": True}
        if is_padded:
            self.options["src_key_padding_mask"] = torch.arange(8).expand(3, -1) >= 5
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x, **self.options))  # type: ignore[no-any-return]


def program(name: str) -> Subject:
    torch.manual_seed(0)
    return Subject(Encoder(**CASES[name]), (torch.randn(3, 8, 32),))


def model_and_input(name: str) -> tuple[nn.Module, torch.Tensor]:
    subject = program(name)
    assert isinstance(subject.program, nn.Module)
    return subject.program, subject.args[0]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("name", CASES)
def test_bits_of_eager_autocast(name: str, way: Way) -> None:
    with torch.no_grad():
        assert oracle.check(lambda: program(name), way, torch.bfloat16) is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        *((name, "aot_eager") for name in CASES),
        pytest.param("padded and causal", "inductor", marks=needs.CPP_COMPILER),
    ],
)
def test_each_compiler_has_the_bits(name: str, compiler: str) -> None:
    """AOTAutograd calls the op of a layer with autocast off."""
    model, x = model_and_input(name)
    numerics = {"numerics": "eager"} if compiler == "inductor" else {}
    compiled = torch.compile(model, backend="amp_fx", options={"compiler": compiler, **numerics})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, result = model(x), compiled(x)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


@pytest.mark.one_in(2)
@needs.CPP_COMPILER
@torch.no_grad()
@pytest.mark.parametrize("name", ["relu", "padded and causal"])
def test_generated_code_packs_the_weights_of_products(name: str) -> None:
    """Compares the error to float64 with that of eager autocast, which calls the op of a layer."""
    model, x = model_and_input(name)
    amp_fx.weight_cache.clear()
    result, (code,) = run_and_get_code(torch.compile(model, backend="amp_fx"), x)
    names = {name for value in amp_fx.weight_cache.stats().values for name in value.weights}
    assert {"encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.1.linear1.weight"} <= names
    assert "_native_multi_head_attention" not in calls(code)
    assert "_addmm_activation" not in calls(code)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
    exact = model.double()(x.double())
    assert (result - exact).abs().mean() <= (eager - exact).abs().mean()


def calls(code: str) -> str:
    """The ops that generated code calls, without its comments and the names of its kernels."""
    return "\n".join(re.findall(r"torch\.ops\.aten\.\S+\(", code))


@pytest.mark.parametrize("policy", [None, "torch"])
def test_a_region_inside_of_compiled_code_gives_the_dtype_of_eager_code(policy: str | None) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True).eval()
    x = torch.randn(3, 5, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        region = torch.autocast("cpu") if policy is None else amp_fx.autocast("cpu", policy=policy)
        with region:
            y: torch.Tensor = layer(x)
        return y

    with torch.no_grad():
        expected = program(x)
        found = torch.compile(program, backend="amp_fx", options={"compiler": "eager"})(x)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
