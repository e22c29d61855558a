"""``compile_step`` as CUDA's code, executed: training in float16 against torch's own scaler.

The step that inductor generates adds up norms in another order than eager mode, and has another
``pow``. Adam divides by ``1 - 0.999 ** step``, which makes one rounding of that up to a thousand
times larger. Numbers are compared within what this allows (``TOLERANCE``), the scale exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.cuda import needs

needs.start()

from tests.cuda import generated  # noqa: E402

generated.start()

import amp_fx  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BAD = (None, None, math.inf, None, math.nan, None)
"""What goes into the gradients of each step."""

LR = 0.1
TOLERANCE = LR * torch.finfo(torch.float32).eps / 2 / (1 - 0.999)
"""What half a unit of float32 in the second moment's correction changes in one step."""

SHAPES: tuple[tuple[int, ...], ...] = ((40, 30), (50,), ())

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=LR, capturable=True, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=LR, capturable=True, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=LR, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, foreach=False),
}


def made() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], scale: float, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).cuda()
    bad = BAD[step]
    if bad is not None:
        assert params[0].grad is not None
        params[0].grad[0, 0] = bad


def train(name: str, max_norm: float | None, *, is_compiled: bool) -> tuple[Any, list[float]]:
    """The weights and the scale after each step."""
    torch._dynamo.reset()
    params = made()
    optimizer = OPTIMIZERS[name](params)
    settings: dict[str, Any] = {"init_scale": 256.0, "growth_interval": 2}
    kind: Any = amp_fx.GradScaler if is_compiled else torch.amp.GradScaler
    scaler = kind("cuda", **settings)
    step = scaler.compile_step(optimizer, max_norm=max_norm) if is_compiled else None
    weights, scales = [], []
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
        weights.append([param.detach().cpu() for param in params])
        scales.append(scaler.get_scale())
    return weights, scales


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_numbers_as_torchs_scaler(name: str, max_norm: float | None) -> None:
    expected, scales = train(name, max_norm, is_compiled=False)
    actual, found = train(name, max_norm, is_compiled=True)
    assert found == scales == [256.0, 512.0, 256.0, 256.0, 128.0, 128.0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=TOLERANCE)
