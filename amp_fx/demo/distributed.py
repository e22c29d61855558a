"""Trains a small model over several processes: DDP, FSDP2 and tensor parallel, in turn.

    torchrun --nproc_per_node 2 -m amp_fx.demo.distributed

On NCCL where every process finds a GPU of its own, else on gloo and the CPU. Each wrapper is
trained twice with the same batches, in eager ``torch.autocast`` and compiled by amp_fx inside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from amp_fx import __version__, weight_cache
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.entry import explain
from amp_fx.integrations.fsdp import fsdp_policy
from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WIDTH = 128
MICRO_BATCHES = 2


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From and to ``[batch, width]``."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Some blocks, and a layer before and behind them."""

    def __init__(self, width: int = WIDTH, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[batch, 16]`` to ``[batch, 8]``."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


@dataclasses.dataclass(frozen=True)
class Place:
    """Describes where this process computes, and with which others."""

    rank: int
    num_ranks: int
    device: torch.device
    compiler: str

    def compiled(self, module: nn.Module) -> None:
        """Compiles a module, in place."""
        options = {"compiler": self.compiler, "dtype": torch.bfloat16}
        module.compile(backend="amp_fx", options=options)


def ddp(model: Net, place: Place, *, compiles: bool) -> nn.Module:
    """Every process has the whole model, and gradients are summed."""
    if compiles:
        place.compiled(model)
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Net, place: Place, *, compiles: bool) -> nn.Module:
    """Every process has a part of each weight, and gathers block by block."""
    from torch.distributed.fsdp import fully_shard

    options: dict[str, Any] = {}
    if compiles:
        explanation = explain(model)(torch.empty(4, 16, device=place.device))
        with contextlib.suppress(UnsupportedError):  # before torch 2.15: gathered in float32
            options["mp_policy"] = fsdp_policy(model, explanation)
    for part in (model.first, *model.blocks, model.last):
        if compiles:
            place.compiled(part)
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def tensor_parallel(model: Net, place: Place, *, compiles: bool) -> nn.Module:
    """Every process has columns of one layer and rows of the next."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(place.device.type, (place.num_ranks,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if compiles:
        place.compiled(model)
    return model


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
}


@dataclasses.dataclass
class Run:
    """One training: losses of this process, and what was counted."""

    losses: list[float]
    made: int
    kept: int
    bytes: int
    gathered: int


def train(name: str, place: Place, updates: int, *, compiles: bool) -> Run:
    """Trains a new model in a wrapper."""
    weight_cache.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = WRAPPERS[name](Net().to(place.device), place, compiles=compiles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    shared = name == "tensor parallel"  # whose processes see the same batches
    with counted_gathers() as gathered:
        for update in range(updates):
            optimizer.zero_grad()
            for micro in range(MICRO_BATCHES):
                seed = 1000 * update + 100 * micro + (0 if shared else place.rank)
                x, y = _batch(seed, place.device)
                with torch.autocast(place.device.type, torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x).float(), y)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            optimizer.step()
    stats = weight_cache.stats()
    return Run(losses, stats.refreshes, stats.entries, stats.bytes, sum(gathered))


def _batch(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A function to learn, and noise."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
    return x.to(device), (x[:, :8] * x[:, 8:]).sin().to(device)


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Counts the bytes that this process passes to FSDP2's all-gathers.

    Relies on FSDP2 calling ``torch.distributed.all_gather_single``, before torch 2.15
    ``all_gather_into_tensor``, with the tensor to gather as ``input_tensor`` or second.
    """
    sent: list[int] = []
    names = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            given = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
            sent.append(given.numel() * given.element_size())
            return original(*args, **kwargs)

        return gather

    with replaced(*((dist, name, counting(getattr(dist, name))) for name in names)):
        yield sent


def table_of(runs: dict[str, tuple[Run, Run]], updates: int) -> Table:
    """Makes a table of what happened, with a row for each wrapper."""
    table = Table(title=f"torch.autocast (eager) and amp_fx, {updates} updates")
    table.add_column("wrapper")
    for header in (
        *("last loss", "with amp_fx", "losses alike", "casts kept", "made per update"),
        *("bytes of copies", "gathered", "with amp_fx"),
    ):
        table.add_column(header, justify="right")
    for name, (eager, ours) in runs.items():
        numbers = zip(eager.losses, ours.losses, strict=True)
        largest = max(abs(a - b) for a, b in numbers)
        table.add_row(
            name,
            f"{eager.losses[-1]:.6f}",
            f"{ours.losses[-1]:.6f}",
            "all bits" if largest == 0 else f"to {largest:.1e}",
            str(ours.kept),
            f"{ours.made / updates:g}",
            f"{ours.bytes:,}",
            f"{eager.gathered:,}",
            f"{ours.gathered:,}",
        )
    return table


@contextlib.contextmanager
def process_group(compiler: str) -> Iterator[Place]:
    """The processes that ``torchrun`` has started."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() > rank
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), device, compiler)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains all, and prints the table in the first process; 1 if a loss is no number."""
    parser = argparse.ArgumentParser("amp_fx.demo.distributed", description=__doc__)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument(
        "--compiler",
        choices=("aot_eager", "inductor"),
        default="aot_eager",
        help="with inductor, losses differ from eager ones by its own roundings",
    )
    given = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc_per_node 2 -m amp_fx.demo.distributed")
    runs: dict[str, tuple[Run, Run]] = {}
    with process_group(given.compiler) as place:
        for name in WRAPPERS:
            eager = train(name, place, given.updates, compiles=False)
            runs[name] = eager, train(name, place, given.updates, compiles=True)
        if place.rank == 0:
            where = f"{place.num_ranks} processes on {place.device.type}, torch {torch.__version__}"
            console = Console(width=max(Console().width, 120))
            console.print(f"amp_fx {__version__}, {where}, {place.compiler}")
            console.print(table_of(runs, given.updates))
    losses = [loss for pair in runs.values() for run in pair for loss in run.losses]
    return 0 if all(map(math.isfinite, losses)) else 1


if __name__ == "__main__":
    sys.exit(main())
