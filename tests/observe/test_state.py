"""Each tool restores all that a step writes, bit for bit, also after an exception."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

import amp_fx
from amp_fx.errors import ArgumentTypeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

TOOLS: dict[str, Callable[..., Any]] = {
    "accuracy": amp_fx.accuracy,
    "audit": amp_fx.audit,
    "record": amp_fx.record,
}
PLACES = ("forward", "region", "backward", "unscaled", "stepped")


class Counting(nn.Linear):
    """Layer with attributes that a step changes."""

    def __init__(self) -> None:
        super().__init__(16, 32)
        self.calls, self.history = 0, {"losses": list[float]()}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Trainer:
    """A model with everything that a step writes to: buffers, states, a scaler, a schedule."""

    def __init__(self, dtype: torch.dtype, kind: Callable[..., torch.optim.Optimizer]) -> None:
        self.counting = Counting()
        layers = [self.counting, nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16)]
        self.layers = [layer.to(dtype) for layer in layers]
        self.model, self.dtype = nn.Sequential(*self.layers), dtype
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        scaler = amp_fx.GradScaler if dtype == torch.float32 else torch.amp.GradScaler
        self.scaler = scaler("cpu", init_scale=4.0, growth_interval=1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.generator = torch.Generator().manual_seed(3)
        self.fails_in = ""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self._fail("forward")
        noise = torch.randn(x.shape, generator=self.generator).to(x.dtype)
        x = x + noise * random.random()
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
            loss = F.cross_entropy(x, y)
            self._fail("region")
        loss.register_hook(lambda _: self._fail("backward"))  # type: ignore[no-untyped-call]
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        self._fail("unscaled")
        self.scaler.step(self.optimizer)
        self._fail("stepped")
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counting.history["losses"].append(float(loss.detach()))
        return loss

    def _fail(self, place: str) -> None:
        if self.fails_in == place:
            raise ValueError(place)

    def state(self) -> list[Any]:
        """Returns everything that a step may change, with copies of tensors."""
        states = [
            [*self.model.parameters(), *self.model.buffers()],
            [parameter.grad for parameter in self.model.parameters()],
            self.optimizer.state_dict(),
            self.scaler.state_dict(),
            dict(self.scaler._per_optimizer_states),
            {k: v for k, v in self.schedule.state_dict().items() if not k.startswith("_get")},
            [self.generator.get_state(), torch.get_rng_state(), random.getstate()],
            [self.counting.history, self.counting.calls],
        ]
        leaves = pytree.tree_leaves(states)
        return [v.detach().clone() if isinstance(v, Tensor) else v for v in leaves]


def is_equal(before: list[Any], after: list[Any]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    return lambda parameters, lr: kind(parameters, lr=lr, **options)  # type: ignore[call-arg]


WAYS = {
    "adamw": (torch.float32, optimizer(torch.optim.AdamW)),
    "foreach": (torch.float32, optimizer(torch.optim.AdamW, foreach=True)),
    "fused": (torch.float32, optimizer(torch.optim.AdamW, fused=True)),
    "low": (torch.bfloat16, optimizer(torch.optim.AdamW)),
    "momentum": (torch.bfloat16, optimizer(torch.optim.SGD, momentum=0.9)),
}
CASES = [
    (tool, way)
    for way, (dtype, _) in WAYS.items()
    for tool in TOOLS
    if tool != "accuracy" or dtype == torch.float32  # it compares with float32 weights
]


def process_state() -> list[Any]:
    """Returns what a tool changes in the process while it runs."""
    tables = (
        hooks._global_forward_hooks,
        hooks._global_forward_pre_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    methods = [vars(torch.autocast)[name] for name in ("__init__", "__enter__", "__exit__")]
    frames = dict(torch._dynamo.utils.counters["frames"])
    return [*(len(table) for table in tables), *methods, torch.is_autocast_enabled("cpu"), frames]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fails_in", ["", *PLACES])
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(("tool", "way"), CASES)
def test_nothing_changes(tool: str, way: str, num_before: int, fails_in: str) -> None:
    torch.manual_seed(0)
    trainer = Trainer(*WAYS[way])
    x, y = torch.randn(8, 16, dtype=trainer.dtype), torch.randint(16, (8,))
    for _ in range(num_before):
        trainer.step(x, y)
    gradients = [torch.randn_like(p) for p in trainer.model.parameters()]
    for parameter, gradient in zip(trainer.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before, process, history = trainer.state(), process_state(), trainer.counting.history

    trainer.fails_in = fails_in
    examined = TOOLS[tool](trainer.step)
    if fails_in:
        with pytest.raises(ValueError, match=fails_in):
            examined(x, y)
    else:
        report = examined(x, y)
        if tool == "record" and way == "adamw":
            stages = {op.stage for op in report.ops}
            assert stages == {"forward", "backward", "result", "update"}

    assert is_equal(before, trainer.state())
    assert trainer.counting.history is history
    for parameter, gradient in zip(trainer.model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
    assert process == process_state()


def test_the_next_steps_are_those_without_an_audit() -> None:
    losses = []
    for is_audited in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        trainer = Trainer(torch.float32, torch.optim.AdamW)
        x, y = torch.randn(8, 16), torch.randint(16, (8,))
        for _ in range(3):
            if is_audited:
                amp_fx.audit(trainer.step)(x, y)
            losses.append(trainer.step(x, y).item())
    assert losses[:3] == losses[3:]


def test_an_optimizer_that_the_step_creates_the_access_to_is_restored() -> None:
    """The step reaches it by a name that the audit cannot see."""
    model = nn.Linear(4, 4)
    held = {"inner": {"inner": torch.optim.AdamW(model.parameters())}}

    def step(x: Tensor) -> None:
        torch.autograd.backward(model(x).sum())
        held["inner"]["inner"].step()

    before = model.weight.detach().clone()
    amp_fx.audit(step)(torch.randn(2, 4))
    assert torch.equal(model.weight, before)
    assert not held["inner"]["inner"].state
    assert model.weight.grad is None


def test_wrong_arguments_are_refused() -> None:
    model: Any = nn.Linear(4, 4)
    with pytest.raises(ArgumentTypeError, match="optimizer=3"):
        amp_fx.audit(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="scaler="):
        amp_fx.audit(model, None, model)
    with pytest.raises(ArgumentTypeError, match=r"amp_fx\.audit expects"):
        amp_fx.audit(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="whole training step"):
        amp_fx.audit(model)(torch.randn(2, 4))
    with pytest.raises(UnsupportedError, match="whole training step"), torch.no_grad():
        amp_fx.audit(lambda x: model(x).sum())(torch.randn(2, 4))
