"""``compile_step`` as CUDA's code, executed: training in float16 against torch's own scaler.

The step that inductor generates adds up norms in another order than eager mode, and has another
``pow``. Adam divides by ``1 - 0.999 ** step``, which makes one rounding of that up to a thousand
times larger. Numbers are compared within what this allows (``TOLERANCE``), the scale exactly. A
call after each step, which reads the copies that the step wrote, has the bits of eager autocast.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.cuda import needs

needs.start()

from tests.cuda import generated  # noqa: E402

generated.start()

import amp_fx  # noqa: E402
from amp_fx import weight_cache  # noqa: E402
from tests.cuda.nets import is_same  # noqa: E402
from tests.cuda.step_faults import STEP_FAULTS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")

BAD = (None, None, math.inf, None, math.nan, None)
"""What goes into the gradients of each step."""

LR = 0.1
TOLERANCE = LR * torch.finfo(torch.float32).eps / 2 / (1 - 0.999)
"""What half a unit of float32 in the second moment's correction changes in one step."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=LR, capturable=True, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=LR, capturable=True, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=LR, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, foreach=False),
}


class Net(nn.Module):
    """Two products, and a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return y


def set_gradients(params: list[nn.Parameter], scale: float, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).cuda()
    bad = BAD[step]
    if bad is not None:
        assert params[0].grad is not None
        params[0].grad.view(-1)[0] = bad


@dataclasses.dataclass
class Trained:
    """What each step left behind.

    Attributes:
        weights: The weights.
        scales: The scale.
        stale: The steps after which a call does not compute with the weights as they are.
    """

    weights: list[list[Tensor]]
    scales: list[float]
    stale: list[int]

    def differs(self, other: Trained) -> bool:
        """Whether the weights or scales are others, or calls were wrong."""
        try:
            torch.testing.assert_close(self.weights, other.weights, rtol=1e-5, atol=TOLERANCE)
        except AssertionError:
            return True
        return self.scales != other.scales or bool(self.stale)


def train(name: str, max_norm: float | None, *, is_compiled: bool, **options: Any) -> Trained:
    """Steps a model whose gradients are given, and calls it after each step."""
    torch._dynamo.reset()
    weight_cache.clear()
    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(4, 16).cuda()
    params = list(model.parameters())
    settings: Any = {"compiler": "aot_eager", "fallback": False, "weight_cache": "training"}
    program = torch.compile(model, backend="amp_fx", options=settings)
    optimizer = OPTIMIZERS[name](params)
    kind: Any = amp_fx.GradScaler if is_compiled else torch.amp.GradScaler
    scaler = kind("cuda", init_scale=256.0, growth_interval=2)
    step = scaler.compile_step(optimizer, max_norm=max_norm, **options) if is_compiled else None
    found = Trained([], [], [])
    for i in range(len(BAD)):
        set_gradients(params, float(scaler.scale(torch.ones((), device="cuda"))), i)
        if step is not None:
            step()
        else:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, max_norm, foreach=False)
            scaler.step(optimizer)
            scaler.update()
        found.weights.append([param.detach().cpu() for param in params])
        found.scales.append(scaler.get_scale())
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            found.stale += [] if is_same(program(x), model(x)) else [i]
    return found


SETTINGS = [(name, max_norm) for name in OPTIMIZERS for max_norm in (None, 1.0)]
EAGER = {"backend": "eager"}
COMPILERS = [
    pytest.param({}, marks=pytest.mark.slow, id="inductor"),
    pytest.param(EAGER, id="eager"),
]


@pytest.mark.parametrize("options", COMPILERS)
@pytest.mark.parametrize(("name", "max_norm"), SETTINGS)
def test_same_numbers_as_torchs_scaler(
    name: str, max_norm: float | None, options: dict[str, Any]
) -> None:
    expected = train(name, max_norm, is_compiled=False)
    found = train(name, max_norm, is_compiled=True, **options)
    assert found.scales == expected.scales == [256.0, 512.0, 256.0, 256.0, 128.0, 128.0]
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=TOLERANCE)
    assert not found.stale


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STEP_FAULTS[name].plant(monkeypatch)
    assert any(
        train(optimizer, 1.0, is_compiled=True, **EAGER).differs(
            train(optimizer, 1.0, is_compiled=False)
        )
        for optimizer in ("adamw", "sgd")
    )
