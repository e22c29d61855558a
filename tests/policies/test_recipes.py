"""The recipes of README.md; attention scores are ``test_numbers_of_a_module``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import Policy, preset
from tests.policies.nets import WIDTH, Decoder
from tests.programs import Run, assert_same_bits, compiled, decisions_of, run_program

if TYPE_CHECKING:
    from tests.programs import Program

CUDA_LISTS = preset("torch").with_device("cpu", preset("torch").tables["cuda"])
"""CUDA's lists for the CPU, whose own leave normalizations low."""


class LabelLoss(nn.Module):
    """Cross entropy with a margin, written by hand."""

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        right = logits.gather(-1, target[..., None])[..., 0]
        return (logits.logsumexp(-1) - right + 0.1).mean()


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=rng).requires_grad_()


def both(program: Program, x: torch.Tensor, policy: Policy) -> list[Run]:
    """Through amp_fx.compile, and in a region."""
    fast = amp_fx.compile(program, policy=policy, options={"compiler": "eager"})
    region = amp_fx.autocast("cpu", policy=policy)(compiled(program))
    return [run_program(call, [x]) for call in (fast, region)]


@pytest.mark.parametrize("how", ["class", "op"])
def test_a_normalization_is_kept_low(how: str, x: torch.Tensor) -> None:
    policy = CUDA_LISTS.with_modules({nn.LayerNorm: "lower_precision_fp"})
    if how == "op":
        policy = CUDA_LISTS.with_ops({"layer_norm": "lower_precision_fp"})
    net = Decoder()
    norms = [d for d in decisions_of(net, x, policy=policy) if d.path.endswith("norm")]
    assert [d.policy for d in norms] == ["lower_precision_fp"] * 2
    torch._dynamo.reset()
    norm: Any = net.get_submodule("blocks.0.norm")

    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = norm(net.embed(x))
        return result

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        weight, bias = net.embed.weight.bfloat16(), net.embed.bias.bfloat16()
        hidden = nn.functional.linear(low, weight, bias)
        weight, bias = norm.weight.bfloat16(), norm.bias.bfloat16()
        return nn.functional.layer_norm(hidden, (WIDTH,), weight, bias)

    for run in both(program, x, policy):
        assert_same_bits(run, run_program(by_hand, [x]))
    default = compiled(program, policy=CUDA_LISTS, output_dtype="autocast")(x)
    assert default.dtype == torch.float32


def test_a_loss_is_kept_in_float32(x: torch.Tensor) -> None:
    head, loss, target = nn.Linear(WIDTH, WIDTH), LabelLoss(), torch.randint(WIDTH, (2, 4))
    policy = Policy.default().with_modules({LabelLoss: "fp32"})

    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = loss(head(x), target)
        return result

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        low = nn.functional.linear(x.bfloat16(), head.weight.bfloat16(), head.bias.bfloat16())
        return LabelLoss()(low.float(), target)  # type: ignore[no-any-return]

    expected = run_program(by_hand, [x])
    assert expected.outputs[0].dtype == torch.float32
    for run in both(program, x, policy):
        torch.testing.assert_close(run.outputs, expected.outputs, rtol=0, atol=0)
        # By hand one cast feeds both uses of the logits, whose gradients are then summed in
        # float32; here each has its own, as everywhere in autocast.
        torch.testing.assert_close(run.grads, expected.grads, rtol=1e-2, atol=1e-3)
    with torch.autocast("cpu"):
        assert program(x).dtype == torch.bfloat16
