"""``amp_fx.accuracy(..., modules=...)``: one block, with the inputs that it gets in the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

import amp_fx
from amp_fx.errors import UnsupportedError
from tests.numerics.faults import FAULTS, TinyGPT

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.numerics.report import AccuracyReport


def suspects_of(report: AccuracyReport, block: str) -> list[Any]:
    found = [s for s in report.suspects if s.module.startswith(block)]
    return [(s.kind, s.module, s.op, s.stage, s.line) for s in found]


def products_of(report: AccuracyReport) -> list[float]:
    """Returns the errors of the products in the block, on their own inputs."""
    inside = [n for n in report.nodes if n.stage == "forward" and n.module.startswith("h.1")]
    return [n.local for n in inside if n.kernel in ("aten::addmm", "aten::bmm")]


@pytest.mark.parametrize("name", [*FAULTS][::4])
def test_the_findings_inside_of_a_block_are_those_of_the_whole_step(name: str) -> None:
    torch.manual_seed(0)
    fault = FAULTS[name]
    net, inputs = TinyGPT(fault.make()), TinyGPT.inputs()
    whole = amp_fx.accuracy(net, dtype=fault.dtype)(*inputs)
    some = amp_fx.accuracy(net, dtype=fault.dtype, modules="h.1")(*inputs)
    assert suspects_of(some, "h.1") == suspects_of(whole, "h.1") != []
    assert {node.module.split(".")[1] for node in some.nodes} == {"1"}
    assert {gradient.name.split(".")[1] for gradient in some.gradients} == {"1"}
    assert products_of(some) == pytest.approx(products_of(whole), rel=1e-3)


def test_a_sound_block_has_no_suspect_and_the_error_of_the_step_is_unknown() -> None:
    net, inputs = TinyGPT(), TinyGPT.inputs()
    report = amp_fx.accuracy(net, modules="h.1")(*inputs)
    assert report.suspects == ()
    assert report.modules == ("h.1",)
    assert (report.reference_loss, report.error) == (None, None)
    assert report.loss == amp_fx.accuracy(net)(*inputs).loss
    assert str(report).startswith("TinyGPT on cpu bfloat16, against float32: only h.1")
    with pytest.raises(UnsupportedError, match="matches no module"):
        amp_fx.accuracy(net, modules="layers.*")(*inputs)


def test_a_block_alone_with_recorded_inputs_gives_the_same_errors() -> None:
    """The oracle is an examination of the block by itself, in the program of its ops."""
    net, inputs = TinyGPT(), TinyGPT.inputs()
    given: list[Tensor] = []
    hook = net.h[1].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with hook, torch.no_grad(), torch.autocast("cpu"):
        net(*inputs)
    alone = amp_fx.accuracy(net.h[1])(given[0])
    some = amp_fx.accuracy(net, modules="h.1")(*inputs)

    def errors(report: AccuracyReport) -> list[tuple[str, float, float]]:
        forward = [n for n in report.nodes if n.stage == "forward"]
        return [(n.kernel, n.local, n.accumulated) for n in forward]

    assert errors(some) == errors(alone)


def peak(call: Callable[[], Any]) -> int:
    """Returns the largest number of bytes that a call has allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    now = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def test_the_additional_memory_is_that_of_the_block() -> None:
    """Six equal blocks: one of them needs about a sixth of the copies."""
    net, x = nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(8, 64, 64)

    def step(x: Tensor) -> Tensor:
        result: Tensor = net(x).float().square().mean()
        return result

    def plain() -> None:
        with torch.autocast("cpu"):
            loss = step(x)
        loss.backward()  # type: ignore[no-untyped-call]
        net.zero_grad()

    plain()
    without = peak(plain)
    whole = peak(lambda: amp_fx.accuracy(step)(x))
    some = peak(lambda: amp_fx.accuracy(step, modules="3")(x))
    assert 0 < some - without < 0.35 * (whole - without)
