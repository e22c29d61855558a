"""The numbers of float8 policies are those of torchao, bit for bit, forward and backward."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.backend.numerics import numerics_config
from amp_fx.options import Options
from amp_fx.torch_private import inductor_config
from tests.float8.torchao_oracle import RECIPES, bfloat16_of_cuda, converted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("torchao", reason="the oracle is torchao 0.18")
pytestmark = [
    pytest.mark.usefixtures("_low_products"),  # attention's backward may be in float32
    pytest.mark.usefixtures("_code_without_vectors"),
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning"),
    pytest.mark.parametrize("recipe", RECIPES),
]


@pytest.fixture
def _code_without_vectors() -> Iterator[None]:
    """Inductor sums a row in one order.

    With vectors, the order depends on the number of lanes, and inductor takes it from the dtypes
    of all ops of a kernel. torchao finds its scales by other ops than we do, so other ops share
    the kernels of the norms' gradients.
    """
    with inductor_config.config.patch({"cpp.simdlen": 1}):
        yield


def mlp() -> nn.Module:
    sizes = (32, 64, 96, 48, 16)
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=16,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def trained(model: nn.Module, call: Callable[..., Any], inputs: Any) -> list[torch.Tensor]:
    """Outputs, gradients and weights of five updates of four micro-batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found = []
    for _ in range(5):
        for _ in range(4):
            y = call(inputs())
            found.append(y.detach().clone())
            y.float().square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()]


def slow(*compilers: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in compilers]


INDUCTOR = slow("inductor", "strict inductor")


def check(
    model: nn.Module,
    recipe: str,
    compiler: str,
    make: Callable[[], torch.Tensor],
    read: Callable[[Any], torch.Tensor] = lambda y: y,
) -> None:
    oracle = converted(model, recipe)
    options: dict[str, Any] = {"policy": f"float8-{recipe}", "compiler": compiler.split()[-1]}
    options |= {"output_dtype": "autocast", "fallback": False}
    if compiler == "strict inductor":
        options["numerics"] = "strict"
    # A kernel that casts and quantizes a weight does not round in between, unless it is strict.
    options["weight_cache"] = True if compiler == "inductor" else "training"
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend="amp_fx", options=options)
    # Dynamo takes another branch of Llama's attention than eager code does.
    reference: Any = torch.compile(oracle, **_reference(compiler))

    def in_region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return read(reference(x))

    torch.manual_seed(1)
    found = trained(ours, lambda x: read(compiled(x)), make)
    torch.manual_seed(1)
    with bfloat16_of_cuda():
        expected = trained(oracle, in_region, make)
    assert len(found) == len(expected)
    assert [i for i, pair in enumerate(zip(found, expected, strict=True)) if not _same(*pair)] == []


def _reference(compiler: str) -> dict[str, Any]:
    """Returns the arguments of ``torch.compile`` for the oracle."""
    if compiler == "inductor":
        return {}
    if compiler == "strict inductor":
        return {"options": numerics_config(Options.parse({"numerics": "strict"}))}
    return {"backend": "eager"}


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", *INDUCTOR])
def test_training_an_mlp(recipe: str, compiler: str) -> None:
    torch.manual_seed(0)
    check(mlp(), recipe, compiler, lambda: torch.randn(32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", *INDUCTOR])
def test_training_a_llama(recipe: str, compiler: str) -> None:
    torch.manual_seed(0)
    check(_llama(), recipe, compiler, lambda: torch.randint(64, (2, 16)), lambda y: y.logits)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", *INDUCTOR])
def test_training_a_vit(recipe: str, compiler: str) -> None:
    torch.manual_seed(0)
    check(_vit(), recipe, compiler, lambda: torch.randn(2, 3, 32, 32), lambda y: y.logits)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_weights_and_inputs_of_zeros_and_nans(recipe: str, compiler: str, fill: float) -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(32, 32)
    with torch.no_grad():
        weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        weights[1][3] = fill
        weights[2].zero_()
        x[5] = fill
    oracle = converted(model, recipe)
    options: dict[str, Any] = {"policy": f"float8-{recipe}", "compiler": compiler}
    options |= {"output_dtype": "autocast", "weight_cache": "training"}
    y = torch.compile(model, backend="amp_fx", options=options)(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = oracle(x)
    y.float().square().mean().backward()
    with bfloat16_of_cuda():
        expected.float().square().mean().backward()
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
