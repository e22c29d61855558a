"""A small model, and a way to train it with and without amp_fx in the same wrapper."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Compile = Callable[[nn.Module], nn.Module]

NUM_BLOCKS = 2  # as few as are a list still: every case compiles all of them
NUM_CASTS = 4 + 4 * NUM_BLOCKS  # weights and biases of linear layers, two of them in each block
NUM_UPDATES = 3
NUM_MICRO = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def make_net(width: int = 32) -> Net:
    """Builds a net with the same weights each time."""
    torch.manual_seed(0)
    return Net(width)


OPTIONS = {"compiler": "aot_eager", "weight_cache": "training"}


def compiled(model: Any, compiler: str = "aot_eager", **options: Any) -> Any:
    given = {**OPTIONS, "compiler": compiler, **options}
    return torch.compile(model, backend="amp_fx", options=given)


def as_it_is(model: Any) -> Any:
    return model


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def batch(update: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * update + 10 * micro + rank)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 8, generator=generator)


def train(
    model: Any,
    rank: int,
    *,
    context: Callable[[], Any] = autocast,
    optimizer: Any = None,
    without_sync: Callable[[Any], Any] | None = None,
    after_update: Callable[[], Any] | None = None,
) -> list[float]:
    """Returns all losses of a few updates, each of several micro-batches."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        for micro in range(NUM_MICRO):
            x, y = batch(update, micro, rank)
            is_last = micro == NUM_MICRO - 1
            waits = without_sync is not None and not is_last
            with without_sync(model) if waits and without_sync else contextlib.nullcontext():
                with context():
                    loss = nn.functional.mse_loss(model(x).float(), y)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        optimizer.step()
        if after_update is not None:
            after_update()
    return losses


def compare(
    make: Callable[[Compile], nn.Module],
    rank: int,
    *,
    make_optimizer: Callable[[nn.Module], Any] | None = None,
    compile_with: Compile = compiled,
    context: Callable[[], Any] = autocast,
    only: str | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Trains with amp_fx and in eager autocast, in the same wrapper.

    Args:
        make: A model in its wrapper, given what to do with the part that amp_fx compiles.
        rank: This process's.
        make_optimizer: AdamW if None.
        compile_with: What compiles.
        context: Around the forward of the compiled one.
        only: "eager" or "ours"; None for both.
        how: For ``train``.

    Returns:
        The losses of both, the number of copies that are kept, and how often one was made.
    """
    found: dict[str, Any] = {}
    for name, compile_ in (("eager", as_it_is), ("ours", compile_with)):
        if only not in (None, name):
            continue
        amp_fx.weight_cache.clear()
        torch._dynamo.reset()
        model = make(compile_)
        optimizer = None if make_optimizer is None else make_optimizer(model)
        around = autocast if name == "eager" else context
        found[name] = train(model, rank, context=around, optimizer=optimizer, **how)
        stats = amp_fx.weight_cache.stats()
        found["kept"], found["made"] = stats.entries, stats.refreshes
        del model, optimizer
    return found
