"""Compiled models that libraries wrap have the bits of eager autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from amp_fx.backend.cpp_compiler import has_cpp_compiler

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

EAGER: dict[str, Any] = {"backend": "amp_fx", "options": {"compiler": "eager"}}
NUMERICS: dict[str, Any] = {"backend": "amp_fx", "options": {"numerics": "eager"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Region(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


class Net(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def trained(net: Net, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    found = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(inputs(step))
        y.float().square().mean().backward()  # type: ignore[no-untyped-call]
        found += [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return [*found, call(inputs(9)), call(inputs(9))]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] > 0


def test_module_compile_of_a_model_and_of_its_blocks() -> None:
    expected = trained(net := Net(), net)
    net = Net()
    net.compile(**EAGER)
    equal(trained(net, net), expected)
    net = Net()
    for block in net.blocks:
        block.compile(**EAGER)
    equal(trained(net, net), expected)


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
def test_nested_compile_regions() -> None:
    expected = trained(net := Net(), net)
    for settings in (EAGER, NUMERICS):
        net = Net(Region)
        equal(trained(net, torch.compile(net, fullgraph=True, **settings)), expected)


def test_fabric_sets_a_compiled_model_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fabric compiles it again, around its own precision."""
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", precision="bf16-mixed")
    from lightning.fabric.wrappers import _capture_compile_kwargs

    # Importing Lightning does that; the scaler's tests take it back.
    monkeypatch.setattr(torch, "compile", _capture_compile_kwargs(torch.compile))

    def run(*, is_compiled: bool) -> list[torch.Tensor]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        program = torch.compile(net, **EAGER) if is_compiled else net
        model, optimizer = fabric.setup(program, optimizer)
        found = []
        for step in range(2):
            y = model(inputs(step))
            fabric.backward(y.square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            found += [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = run(is_compiled=False)
    equal(run(is_compiled=True), expected)


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 20, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.slow
def test_lora_is_merged_and_unmerged() -> None:
    peft = pytest.importorskip("peft")

    def run(*, is_compiled: bool) -> list[torch.Tensor]:
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(gpt2(), config).eval()
        call = torch.compile(model, **EAGER) if is_compiled else model
        found: list[torch.Tensor] = []

        def infer() -> None:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                found.extend(call(input_ids=torch.arange(8)[None]).logits for _ in range(2))

        infer()
        model.merge_adapter()
        infer()
        model.unmerge_adapter()
        infer()
        with model.disable_adapter():
            infer()
        return found

    equal(run(is_compiled=True), run(is_compiled=False))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_with_a_compiled_forward(cache: str | None) -> None:
    def run(*, is_compiled: bool) -> list[torch.Tensor]:
        model = gpt2()
        if is_compiled:
            model.forward = torch.compile(model.forward, **EAGER)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = model.generate(
                torch.arange(1, 5)[None], max_new_tokens=4, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True, cache_implementation=cache,
            )  # fmt: skip
        return [found.sequences, *found.logits]

    equal(run(is_compiled=True), run(is_compiled=False))


def test_int8_weights_of_torchao_next_to_kept_casts() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def run(*, is_compiled: bool) -> list[torch.Tensor]:
        net = Net().eval()
        config = quantization.Int8WeightOnlyConfig()
        quantization.quantize_(net, config, filter_fn=lambda _, path: path.endswith(".up"))
        options: dict[str, Any] = {"compiler": "aot_eager"}  # which caches
        call = torch.compile(net, backend="amp_fx", options=options) if is_compiled else net
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return [call(inputs(step)) for step in range(3)]

    equal(run(is_compiled=True), run(is_compiled=False))
