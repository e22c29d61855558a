"""Training steps with one planted fault each, and their sound twins.

The line that a finding has to name ends with ``# here``. A program is a function that returns the
step, its inputs and the options of ``amp_fx.audit``. Several programs can be made by one function
with different arguments.
"""
# mypy: disable-error-code="no-untyped-call, no-any-return, untyped-decorator"

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    Program = Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]

BFLOAT16 = torch.bfloat16
PLANTED: dict[str, tuple[str, Program]] = {}
"""Programs with a fault, by name, with the kind of the finding."""
SOUND: dict[str, tuple[str, Program]] = {}
"""Their twins without it."""


def planted(kind: str, name: str = "", /, **given: Any) -> Callable[[Any], Any]:
    """Registers a program, made with some arguments, as one with a fault."""
    return functools.partial(_register, PLANTED, kind, name, given)


def sound(kind: str, name: str = "", /, **given: Any) -> Callable[[Any], Any]:
    """Registers a program, made with some arguments, as a sound one."""
    return functools.partial(_register, SOUND, kind, name, given)


def _register(programs: Any, kind: str, name: str, given: dict[str, Any], make: Any) -> Any:
    programs[name or make.__name__] = kind, functools.partial(make, **given)
    return make


def on_batch(*makers: Callable[[], nn.Module]) -> Callable[[Any], Program]:
    """Makes a program of a step that takes new modules and a batch."""

    def decorate(compute: Any) -> Program:
        @functools.wraps(compute)
        def program() -> Any:
            modules = [make() for make in makers]

            def step(x: Tensor, y: Tensor) -> Any:
                return compute(*modules, x, y)

            return step, batch(), {}

        return program

    return decorate


def net(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, width))


def linear() -> nn.Module:
    return nn.Linear(16, 16)


def low_net() -> nn.Module:
    return net().bfloat16()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(16, (8,))


def trained(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()  # here
        return loss

    return step


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None
) -> Callable[..., Any]:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", BFLOAT16, enabled=dtype is None):
            logits = model(x if dtype is None else x.to(dtype))
            return F.cross_entropy(logits.float(), y)

    return trained(optimizer, loss_of)


@sound("all")
def plain() -> Any:
    model = net()
    return training(model, torch.optim.AdamW(model.parameters())), batch(), {}


@planted("update_lost")
def low_weights_with_a_small_rate() -> Any:
    model = net().bfloat16()
    step = training(model, torch.optim.AdamW(model.parameters(), lr=1e-5), BFLOAT16)
    return step, batch(), {}


@planted("update_lost")
def one_norm_that_stays_at_one() -> Any:
    model = net()
    model[2].bfloat16()  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:2](x).bfloat16()  # type: ignore[index]
        return F.cross_entropy(model[3](model[2](hidden).float()), y)  # type: ignore[index]

    return trained(optimizer, loss_of), batch(), {}


@sound("update_lost")
def low_weights_with_a_large_rate() -> Any:
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    return training(model, optimizer, BFLOAT16), batch(), {}


class EachWeight(torch.optim.SGD):
    """SGD whose subclasses write one weight at a time."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                update = group["lr"] * weight.grad
                self.write(weight.detach(), update, self.state[weight])

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        raise NotImplementedError


class Masters(EachWeight):
    """SGD on float32 copies that are in its state."""

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        master = state.setdefault("copy", weight.float().clone())
        master -= update.to(master.dtype)
        weight.copy_(master)


class Kahan(EachWeight):
    """SGD that adds what a step has lost to the next one."""

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        lost = state.setdefault("lost", torch.zeros_like(weight))
        exact, before = lost - update, weight.clone()
        weight.add_(exact)
        lost.copy_(exact - (weight - before))


class ByChance(EachWeight):
    """SGD that rounds up or down by chance."""

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        del state
        exact = weight.float() - update.float()
        bits = exact.contiguous().view(torch.int32)
        bits += torch.randint(1 << 16, bits.shape, dtype=torch.int32)
        weight.copy_((bits & -65536).view(torch.float32))


class Dithered(EachWeight):
    """SGD that adds noise of one unit in the last place before it rounds."""

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        del state
        exact = weight.float() - update.float()
        unit = torch.exp2(torch.frexp(exact)[1] - 8.0)
        weight.copy_((exact + (torch.rand_like(exact) - 0.5) * unit).bfloat16())


class CastBack(EachWeight):
    """SGD that computes in float32, and casts the weights back in the program text."""

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        del state
        weight.copy_((weight.float() - update.float()).bfloat16())


@planted("update_lost", "an_update_that_the_optimizer_casts_back", kind=CastBack)
@sound("update_lost", "float32_copies_in_the_optimizer", kind=Masters)
@sound("update_lost", "lost_parts_are_added_later", kind=Kahan)
@sound("update_lost", "rounding_by_chance", kind=ByChance)
@sound("update_lost", "rounding_after_noise", kind=Dithered)
def _with(kind: type[torch.optim.SGD]) -> Any:
    model = low_net()
    step = training(model, kind(model.parameters(), lr=1e-3), BFLOAT16)
    return step, batch(), {}


@planted("state_low")
def state_cast_to_bfloat16() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.999)
    step = training(model, optimizer)
    for _ in range(2):
        step(*batch())
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    return step, batch(), {}


class LowMomentum(EachWeight):
    """SGD with momentum that its first step creates."""

    dtype = BFLOAT16

    def write(self, weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight, dtype=self.dtype)
        state["momentum"].mul_(0.9).add_(update)
        weight.sub_(state["momentum"].to(weight.dtype))


class Float32Momentum(LowMomentum):
    dtype = torch.float32


@planted("state_low", "state_that_the_first_step_creates", kind=LowMomentum)
@sound("state_low", "float32_state_that_the_first_step_creates", kind=Float32Momentum)
def _with_momentum(kind: type[torch.optim.SGD]) -> Any:
    model = net()
    return training(model, kind(model.parameters(), lr=0.1)), batch(), {}


@planted("state_low", "an_average_of_weights_in_bfloat16", dtype=BFLOAT16, foreach=False)
@planted("state_low", "an_average_of_weights_by_foreach", dtype=BFLOAT16, foreach=True)
@sound("state_low", "an_average_of_weights_in_float32", dtype=torch.float32, foreach=False)
def _averaged(dtype: torch.dtype, *, foreach: bool) -> Any:
    model = net()
    teacher = copy.deepcopy(model).to(dtype).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = training(model, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        train(x, y)
        old: list[Tensor] = [*teacher.parameters()]
        new = [p.detach().to(dtype) for p in model.parameters()]
        if foreach:
            torch._foreach_lerp_(old, new, 1e-4)  # here
            return
        for average, value in zip(old, new, strict=True):
            average.mul_(0.9999).add_(value, alpha=1e-4)  # here

    return step, batch(), {}


@sound("state_low")
def inputs_changed_in_place() -> Any:
    model = net()
    train = training(model, torch.optim.AdamW(model.parameters()))

    def step(x: Tensor, y: Tensor) -> None:
        train(x.add_(torch.randn_like(x)).float(), y)

    x, y = batch()
    return step, (x.bfloat16(), y), {}


@sound("state_low")
def state_in_float32() -> Any:
    step, inputs, options = plain()
    step(*batch())
    return step, inputs, options


@planted("gradient_sum_low", "micro_batches_on_low_weights", dtype=BFLOAT16)
@sound("gradient_sum_low", "micro_batches", dtype=torch.float32)
def _micro_batches(*, dtype: torch.dtype) -> Any:
    model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3 if dtype == BFLOAT16 else 0.1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for part in range(4):
            with torch.autocast("cpu", enabled=dtype == torch.float32):
                logits = model(x[2 * part :][:2].to(dtype)).float()
            F.cross_entropy(logits, y[2 * part :][:2]).backward()  # here
        optimizer.step()

    return step, batch(), {}


@planted("gradient_sum_low", "one_weight_in_each_of_six_layers", caches=True)
@sound("gradient_sum_low", "one_weight_in_each_of_six_layers_cast_each_time", caches=False)
def _recurrent(*, caches: bool) -> Any:
    cell = nn.Linear(16, 16)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", cache_enabled=caches):
            for _ in range(6):
                x = x + cell(x).tanh()  # here
        return x.float().square().mean()

    return step, (torch.randn(8, 16),), {}


@sound("gradient_sum_low")
@on_batch(net)
def an_encoder_of_both_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return F.cross_entropy(model(x) * model(x.flip(0)), y)


@planted("loss_low")
@on_batch(net)
def logits_rounded_before_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits.bfloat16().float(), y)  # here


@planted("loss_low")
@on_batch(net)
def loss_outside_of_the_region(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        logits = model(x)
    return F.cross_entropy(logits, y)  # here


@planted("loss_low")
@on_batch(net)
def a_loss_by_hand(model: nn.Module, x: Tensor, _: Tensor) -> None:
    with torch.autocast("cpu"):
        predicted = model(x)
    loss = (predicted - x.bfloat16()).square().mean()  # here
    loss.backward()


@planted("loss_low", "a_loss_by_hand_in_the_region", is_cast_before=False)
@planted(
    "loss_low",
    "a_loss_by_hand_in_the_region_and_another_term",
    is_cast_before=False,
    is_cast_after=True,
)
@sound("loss_low", "a_loss_by_hand_of_float32_values", is_cast_before=True)
def _loss_by_hand(*, is_cast_before: bool, is_cast_after: bool = False) -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            out = model(x)
            out = out.float() if is_cast_before else out
            loss = -(out.softmax(-1).log().gather(1, y[:, None])).mean()  # here
        return loss.float() + x.square().mean() if is_cast_after else loss

    return step, batch(), {}


@planted("loss_low", "a_logarithm_of_a_loss_by_hand", is_of_loss=True)
@planted("loss_low", "a_backward_of_a_function", is_of_loss=True, backward=torch.autograd.backward)
@planted(
    "loss_low",
    "a_backward_of_several_losses",
    is_of_loss=True,
    backward=lambda loss: torch.autograd.backward([loss * 2, loss]),
)
@sound("loss_low", "a_logarithm_inside_of_a_model", is_of_loss=False)
def _logarithm(*, is_of_loss: bool, backward: Any = Tensor.backward) -> Any:
    model, head = net(), nn.Linear(16, 16)

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu"):
            logs = model(x).softmax(-1).log()  # here
            logs = logs if is_of_loss else head(logs).float().log_softmax(-1)
        loss = -logs.gather(1, y[:, None]).float().mean()
        backward(loss)

    return step, batch(), {}


@planted("loss_low")
@on_batch(net, lambda: nn.LayerNorm(16))
def a_norm_of_rounded_values(model: nn.Module, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    hidden = model(x).bfloat16()
    with torch.autocast("cpu"):
        hidden = norm(hidden)  # here
    return F.cross_entropy(hidden.float(), y)


@planted("loss_low")
@on_batch(low_net)
def a_norm_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    hidden = model(x.bfloat16())
    scale = (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # here
    return F.cross_entropy((hidden * scale).float(), y)


@sound("loss_low")
@on_batch(net)
def a_norm_by_hand_in_float32(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        hidden = model(x).float()
    scale = (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return F.cross_entropy(F.normalize(hidden * scale), y)


@sound("loss_low")
@on_batch(net)
def loss_inside_of_the_region(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return F.cross_entropy(model(x), y)


@sound("loss_low")
@on_batch(net)
def a_loss_of_float32_logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        logits = model(x)
    return F.cross_entropy(logits.float() / 2.0, y) + F.mse_loss(logits.float(), x)


class Experts(nn.Module):
    """A layer with a router, as in mixtures of experts."""

    def __init__(self, *, is_exact: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.is_exact = is_exact

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=not self.is_exact):
            scores = self.gate(x).float().softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)  # here
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]).float() * weights[rows, which, None])
        return out


@planted("router_low", "experts_chosen_in_bfloat16", is_exact=False)
@sound("router_low", "experts_chosen_in_float32", is_exact=True)
def _mixture(*, is_exact: bool) -> Any:
    model = Experts(is_exact=is_exact)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return model(x).float().square().mean()

    return step, (torch.randn(32, 16),), {}


@planted("router_low")
def tokens_kept_by_a_threshold() -> Any:
    score, model = nn.Linear(16, 1), nn.Linear(16, 16)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            kept = score(x).squeeze(-1).sigmoid() > 0.5  # here
            return model(x[kept]).float().square().sum()

    return step, (torch.randn(32, 16),), {}


@sound("router_low")
@on_batch(net)
def choices_that_move_nothing_else(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        logits = model(x)
        leaky = torch.where(logits > 0.5, logits, 0.1 * logits)
        pooled = leaky.max(dim=0).values.float().sum()
        error = (logits - 1).abs()
        huber = torch.where(error < 1, error.square(), 2 * error - 1).float().mean()
        loss = F.cross_entropy(leaky, y) + pooled + huber
    correct = (logits.argmax(-1) == y).float().mean()
    top = logits.topk(3).indices.eq(y[:, None]).any(-1).float().mean()
    assert 0 <= correct <= top
    return loss


@sound("router_low")
@on_batch(net)
def masks_of_random_numbers_and_constants(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        logits = model(x)
        logits = logits * (torch.rand_like(logits) < 0.9)
        kept = (y != 3).to(logits.dtype)
        logits = torch.where((1 - kept)[:, None] == 1, logits.detach(), logits)
        logits = logits[model(x).abs().sum(-1) != 0]
        return F.cross_entropy(logits[kept > 0.5], y[kept > 0.5])


@planted("integer_low", "positions_beyond_256", count=1000)
@sound("integer_low", "positions_up_to_256", count=257)
def _angles(count: int) -> Any:
    frequencies = nn.Parameter(torch.rand(1, 16))

    def step() -> Tensor:
        positions = torch.arange(count)[:, None].float()
        with torch.autocast("cpu"):
            angles = positions @ frequencies  # here
        return angles.float().cos().mean()

    return step, (), {}


@planted("integer_low")
def positions_made_in_bfloat16() -> Any:
    frequencies = nn.Parameter(torch.rand(16))

    def step() -> Tensor:
        positions = torch.arange(1000, dtype=BFLOAT16)[:, None]
        return (positions * frequencies).cos().mean()  # here

    return step, (), {}


@planted("integer_low")
def ids_that_come_back() -> Any:
    table = nn.Embedding(5000, 16)

    def step(ids: Tensor) -> Tensor:
        packed = ids.half()
        return table(packed.long()).square().mean()  # here

    return step, (torch.tensor([2047, 2049, 4003]),), {}


@planted("float32_product", "a_product_in_place", writes=True)
@sound("float32_product", "a_product_out_of_place", writes=False)
def _large_product(*, writes: bool) -> Any:
    weight, base = nn.Parameter(torch.randn(64, 64)), torch.zeros(64, 64)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            hidden = x @ weight
            if writes:
                hidden = base.clone().addmm_(hidden.float(), weight)  # here
            else:
                hidden = torch.addmm(base, hidden, weight)
        return hidden.float().square().mean()

    return step, (torch.randn(64, 64),), {}


@planted("float32_product")
def a_product_with_out() -> Any:
    weight, out = nn.Parameter(torch.randn(64, 64)), torch.empty(64, 64)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            hidden = x @ weight
            fixed = torch.mm(x, weight.detach(), out=out)  # here
        return (hidden.float() * fixed).mean()

    return step, (torch.randn(64, 64),), {}


@sound("float32_product")
@on_batch(net, lambda: nn.Linear(16, 64))
def a_product_in_a_disabled_region(
    model: nn.Module, head: nn.Module, x: Tensor, _: Tensor
) -> Tensor:
    with torch.autocast("cpu"):
        hidden = model(x)
        with torch.autocast("cpu", enabled=False):
            logits = head(hidden.float())
            distances = torch.cdist(logits, logits)
        distances = distances + torch.cdist(logits, logits + 1)
    return distances.mean() + logits.mean()


@planted("float32_product", "a_large_product_in_a_disabled_region", rows=1024, columns=1024)
@sound("float32_product", "a_router_in_a_disabled_region", rows=1024, columns=64)
@sound(
    "float32_product",
    "a_large_product_without_any_region",
    rows=1024,
    columns=1024,
    is_inside=False,
)
def _disabled(*, rows: int, columns: int, is_inside: bool = True) -> Any:
    model, weight = net(rows), nn.Parameter(torch.randn(rows, columns))

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=is_inside):
            hidden = model(x)
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float() @ weight  # here
        return hidden.square().mean()

    return step, batch()[:1], {}


@planted("backward_in_region", "backward_in_the_region", is_inside=True)
@sound("backward_in_region", "backward_after_the_region", is_inside=False)
def _backward(*, is_inside: bool) -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu"):
            loss = F.cross_entropy(model(x), y)
            if is_inside:
                loss.backward()  # here
        if not is_inside:
            loss.backward()

    return step, batch(), {}


@planted("backward_in_region")
def backward_in_the_closure_of_an_optimizer() -> Any:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu"):
                loss = F.cross_entropy(model(x), y)
                loss.backward()  # here
            return loss

        optimizer.step(closure)

    return step, batch(), {}


@sound("backward_in_region")
def checkpoints_and_custom_functions() -> Any:
    model, other = net(), net()

    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad

    weight = nn.Parameter(torch.randn(16, 16))

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu"):
            hidden = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            again = torch.utils.checkpoint.checkpoint(
                other, x.clone().requires_grad_(), use_reentrant=True
            )
            loss = F.cross_entropy(Doubled.apply(hidden + again, weight), y)
        loss.backward()

    return step, batch(), {}


@planted("scaler_with_bfloat16", "a_scaler_with_bfloat16", dtype=BFLOAT16, has_scaler=True)
@planted("scaler_missing", "float16_without_a_scaler", dtype=torch.float16, has_scaler=False)
@sound("scaler_missing", "float16_with_a_scaler", dtype=torch.float16, has_scaler=True)
@sound(
    "scaler_with_bfloat16", "bfloat16_with_a_scaler_that_is_off", dtype=BFLOAT16, has_scaler=False
)
def _scaled(dtype: torch.dtype, *, has_scaler: bool) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=has_scaler)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):  # here
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # here
        scaler.update()

    return step, batch(), {}


@sound("scaler_missing")
def a_teacher_in_float16() -> Any:
    model, teacher = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            target = teacher(x)
        with torch.autocast("cpu"):
            return F.mse_loss(model(x), target)

    return step, batch()[:1], {"optimizer": optimizer}


@planted(
    "scaler_missing", "a_loss_in_float16_without_a_scaler", dtype=torch.float16, has_scaler=False
)
@sound("scaler_missing", "a_loss_in_float16_with_a_scaler", dtype=torch.float16, has_scaler=True)
def _driven(dtype: torch.dtype, *, has_scaler: bool) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):  # here
            return F.cross_entropy(model(x), y)

    scaler = torch.amp.GradScaler("cpu") if has_scaler else None
    return step, batch(), {"optimizer": optimizer, "scaler": scaler}


@planted("weights_low", "weights_stored_in_bfloat16", dtype=BFLOAT16)
@sound("weights_low", "weights_stored_in_float32", dtype=torch.float32)
def _stored(dtype: torch.dtype) -> Any:
    model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", BFLOAT16):  # here
            return F.cross_entropy(model(x), y)

    return trained(optimizer, loss_of), batch(), {}


@sound("weights_low", "frozen_low_weights_with_a_trained_part", has_optimizer=True)
@sound("weights_low", "frozen_low_weights_without_an_optimizer", has_optimizer=False)
def _frozen(*, has_optimizer: bool) -> Any:
    model, adapter = low_net().requires_grad_(False), linear()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", BFLOAT16):
            return F.cross_entropy(adapter(model(x)), y)

    step = trained(torch.optim.AdamW(adapter.parameters()), loss_of) if has_optimizer else loss_of
    return step, batch(), {}


@sound("weights_low")
def low_weights_of_an_optimizer_with_copies() -> Any:
    model = net().bfloat16()
    masters = copy.deepcopy(model).float()
    optimizer = torch.optim.AdamW(masters.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", BFLOAT16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        for master, weight in zip(masters.parameters(), model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters.parameters(), model.parameters(), strict=True):
                weight.copy_(master)

    return step, batch(), {}


@planted("region_without_effect")
@on_batch(net)
def a_region_for_another_device(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):  # here
        return F.cross_entropy(model(x), y)


@planted("region_without_effect")
@on_batch(lambda: net().double())
def a_region_around_float64(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu"):  # here
        return F.cross_entropy(model(x.double()), y)


@sound("region_without_effect")
@on_batch(net)
def regions_that_are_off_or_empty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        logits = model(x)
    with torch.autocast("cpu"):
        logits = model(x) + logits
        with torch.autocast("cpu", enabled=False):
            logits = logits.float() @ torch.ones(16, 16)
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        logits = logits.float() @ torch.ones(16, 16)
    with torch.autocast("cpu"):
        return F.cross_entropy(logits, y)


@planted("upcast_lost", "a_cast_that_autocast_takes_back", is_used=False)
@sound("upcast_lost", "a_cast_that_is_used", is_used=True)
def _upcast(*, is_used: bool) -> Any:
    model, head = net(), nn.Linear(16, 16)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            hidden = model(x).float()  # here
            loss = F.cross_entropy(head(hidden), y)
            return loss + hidden.square().mean() if is_used else loss

    return step, batch(), {}


@planted("upcast_lost")
@on_batch(net)
def a_cast_back_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    hidden = model.bfloat16()(x.bfloat16()).float()  # here
    return F.cross_entropy((hidden[:, None, :].bfloat16() * 2).float().squeeze(1), y)


@sound("upcast_lost")
@on_batch(net, linear)
def a_cast_to_the_dtype_of_a_weight(
    model: nn.Module, head: nn.Module, x: Tensor, y: Tensor
) -> Tensor:
    with torch.autocast("cpu"):
        return F.cross_entropy(head(model(x).to(head.weight.dtype)), y)
