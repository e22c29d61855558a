"""Random programs whose sizes are symbolic: amp_fx against eager ``torch.autocast``, bit for bit.

A program is a chain of layers over images; what a layer does depends on the sizes that reach it.
Each is compiled once with ``dynamic=True`` and called with several sizes. Layers that read numbers
give unbacked sizes, and those of ``torch.func`` give tensors inside of tensors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan, while_loop

from tests.parity import oracle
from tests.parity.oracle import LOW_DTYPES, Subject, Way
from tests.parity.test_random_graphs import random_programs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.parity.oracle import Program

    Layer = Callable[[Tensor, Tensor], Any]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHANNELS = 3
SIZES = ((2, 6, 8), (3, 9, 7))
"""Batch, height and width of each call."""


def product(x: Tensor, w: Tensor) -> Tensor:
    """Returns a product over channels, which autocast runs in the low dtype."""
    return F.conv2d(x, w)


def to_size(x: Tensor, _: Tensor, mode: str) -> Tensor:
    height, width = x.shape[2:]
    return F.interpolate(x, size=(height + 2, width * 2 - height), mode=mode)


def by_factor(x: Tensor, _: Tensor, mode: str) -> Tensor:
    return F.interpolate(x, scale_factor=12 / x.shape[2], mode=mode)


def padded(x: Tensor, _: Tensor, mode: str) -> Tensor:
    height, width = x.shape[2:]
    return F.pad(x, (1, width // 2, height // 3, 0), mode=mode)


def resampled(x: Tensor, _: Tensor) -> Tensor:
    theta = torch.eye(2, 3, dtype=x.dtype).mul(0.8).expand(x.shape[0], 2, 3)
    grid = F.affine_grid(theta, [x.shape[0], CHANNELS, x.shape[3], x.shape[2]])
    return F.grid_sample(x, grid.to(x.dtype))


def unfolded(x: Tensor, _: Tensor) -> Tensor:
    return F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)


def transposed(x: Tensor, w: Tensor) -> Tensor:
    weight = w.expand(CHANNELS, CHANNELS, 2, 2)
    size = (x.shape[2] * 2, x.shape[3] * 2 + 1)
    return torch.nn.functional.conv_transpose2d(
        x, weight, stride=2, output_padding=(size[0] - 2 * x.shape[2], size[1] - 2 * x.shape[3])
    )


def one_hot(x: Tensor, w: Tensor) -> Tensor:
    columns = torch.arange(x.shape[3]) % CHANNELS
    return x @ F.one_hot(columns, CHANNELS).to(x.dtype) @ w[:, :, 0, 0].to(x.dtype)


def bags(x: Tensor, w: Tensor) -> Any:
    rows = torch.arange(x.shape[3]) % CHANNELS
    offsets = torch.arange(0, x.shape[3], 2)
    found = F.embedding_bag(rows, w[:, :, 0, 0], offsets, mode="mean")
    return x + found.sum(0)[:, None, None]


def scattered(x: Tensor, _: Tensor) -> Tensor:
    index = torch.arange(x.shape[3]).flip(0).expand(x.shape)
    return torch.zeros_like(x).scatter_add(3, index, x).gather(3, index)


def selected(x: Tensor, w: Tensor) -> Tensor:
    """Some of the images: how many, only their numbers tell."""
    return product(x[x.flatten(1).sum(1) > 0], w).sum(0, keepdim=True) + x


def counted(x: Tensor, _: Tensor) -> Any:
    return x * torch.unique(torch.arange(x.shape[3]) % 3).shape[0]


def branches(x: Tensor, w: Tensor) -> Any:
    """Without gradients: of those, eager code loses some, and makes all in bfloat16."""
    operands = (x.detach(), w.detach())
    return torch.cond(x.sum() > 0, product, lambda x, w: product(x, w) * 2, operands)


def loop(x: Tensor, w: Tensor) -> Any:
    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, product(y, w).to(y.dtype)

    with torch.no_grad():
        return while_loop(lambda i, y: i < 2, step, (torch.tensor(0), x))[1]  # type: ignore[no-untyped-call]  # noqa: ARG005


def rows(x: Tensor, w: Tensor) -> Any:
    run: Any = map_rows
    return run(F.conv2d, x.detach(), w.detach())


def sums(x: Tensor, w: Tensor) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return (total + F.conv2d(row, w)).to(total.dtype), row * 2

    return scan(step, x[0], x)[1]


def each(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.linear(row.movedim(0, 2), w[:, :, 0, 0]))(x).movedim(3, 1)


def slope(x: Tensor, w: Tensor) -> Any:
    columns = torch.arange(x.shape[3]) % CHANNELS

    def loss(y: Tensor) -> Any:
        marks = F.one_hot(columns, CHANNELS).to(y.dtype)
        return (product(y, w).mean(2).flatten(0, 1) @ marks).square().sum()

    return torch.func.grad(loss)(x)


def tangent(x: Tensor, w: Tensor) -> Any:
    return torch.func.jvp(lambda y: product(to_size(y, w, "bilinear"), w), (x,), (x * 2,))[1]


def pulled_back(x: Tensor, w: Tensor) -> Any:
    output, *backs = torch.func.vjp(lambda y: product(to_size(y, w, "nearest"), w), x)
    return backs[0](output)[0]


def curvature(x: Tensor, w: Tensor) -> Any:
    row = x.mean((0, 2, 3))
    hessian = torch.func.hessian(lambda y: F.linear(y, w[:, :, 0, 0]).float().pow(3).sum())(row)
    return x + hessian.diagonal()[:, None, None]


def reshaped_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y.transpose_(2, 3).unsqueeze_(0)
    z = product(y[0] * 2, w)
    y.squeeze_(0)
    return z + y


def written_view(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    before = product(y * 2, w)
    y[:, :, ::2].mul_(2)
    y.view(y.shape[0], -1)[:, : y.shape[3]].add_(before.sum().to(y.dtype))
    return product(y, w) + before


LAYERS: dict[str, Layer] = {
    "product": product,
    **{
        f"to {mode} size": partial(to_size, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
    },
    **{
        f"by {mode} factor": partial(by_factor, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic", "area")
    },
    **{
        f"{mode} pad": partial(padded, mode=mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "adaptive average": lambda x, _: F.adaptive_avg_pool2d(x, (x.shape[2] // 2 + 1, 4)),
    "adaptive maximum": lambda x, _: F.adaptive_max_pool2d(x, (4, x.shape[3] // 2 + 1)),
    "resampled": resampled,
    "unfolded": unfolded,
    "transposed": transposed,
    "one hot": one_hot,
    "bags": bags,
    "scattered": scattered,
    "selected": selected,
    "counted": counted,
    "branches": branches,
    "loop": loop,
    "rows": rows,
    "sums": sums,
    "vmap": each,
    "grad": slope,
    "jvp": tangent,
    "vjp": pulled_back,
    "hessian": curvature,
    "reshaped in place": reshaped_in_place,
    "written view": written_view,
}


def as_subject(names: tuple[str, ...], *, has_grad: bool) -> Subject:
    torch.manual_seed(oracle.SEED)
    conv = torch.nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False).requires_grad_(has_grad)
    images = tuple(torch.randn(n, CHANNELS, *sizes) for n, *sizes in SIZES)

    def program(x: Tensor) -> list[Tensor]:
        y = product(x, conv.weight)
        for name in names:
            y = LAYERS[name](y, conv.weight)
        return [y, product(y, conv.weight)]

    def drive(run: Program, *images: Tensor) -> list[Any]:
        return [run(image) for image in images]

    return Subject(program, images, module=conv, drive=drive)


@random_programs(8)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3).map(tuple),
    has_grad=st.booleans(),
    way=st.sampled_from(Way),
    dtype=st.sampled_from(LOW_DTYPES),
)
def test_random_shapes(
    names: tuple[str, ...], has_grad: bool, way: Way, dtype: torch.dtype
) -> None:
    def build() -> Subject:
        return as_subject(names, has_grad=has_grad)

    try:
        oracle.run_eager(build(), build(), way, dtype)
    except RuntimeError:
        return  # eager autocast cannot run every program
    found = oracle.check(build, way, dtype, dynamic=True)
    assert found is None, found
