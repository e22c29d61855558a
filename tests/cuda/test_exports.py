"""Programs that were exported for CUDA from models on the CPU: eager autocast's bits on CUDA.

The emulated device computes with the CPU's kernels, and so does the program.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cuda import needs

needs.start()

import amp_fx  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")


class Images(nn.Module):
    """Convolutions with norms, a resized image and a branch on a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.batch, self.group = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = functional.relu(self.batch(self.a(x)))
        z = self.group(self.b(y))
        z = functional.interpolate(z, scale_factor=2.0, mode="bilinear")
        scores = torch.softmax(z.flatten(1) @ z.flatten(1).mT, -1)
        return y, z, scores.exp().sum(-1), y * 2 if scores.dtype == y.dtype else y.square()


class Tokens(nn.Module):
    """A transformer, whose attention is written in products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x = self.table(tokens)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT / 4).softmax(-1)
        x = x + scores @ v
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        logits = self.out(x)
        return scores, x, logits, functional.log_softmax(logits, -1)


def recurrent(kind: str) -> Callable[[], nn.Module]:
    return lambda: getattr(nn, kind)(8, 16, num_layers=2, bidirectional=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "images": (Images, lambda: torch.randn(2, 3, 12, 12)),
    "tokens": (Tokens, lambda: torch.randint(32, (2, 9))),
    "lstm": (recurrent("LSTM"), lambda: torch.randn(5, 3, 8)),
    "gru": (recurrent("GRU"), lambda: torch.randn(5, 3, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_dtypes_and_bits_of_eager_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1234)
    make, make_input = MODELS[name]
    model, x = make().eval(), make_input()
    program = amp_fx.export(model, (x,), device_type="cuda", dtype=dtype, output_dtype="autocast")
    found = torch.utils._pytree.tree_leaves(program.module()(x))
    on_cuda: Any = copy.deepcopy(model).cuda()
    with torch.no_grad(), torch.autocast("cuda", dtype):
        expected = torch.utils._pytree.tree_leaves(on_cuda(x.cuda()))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    # A network is one op, where the device has one for each cell.
    tolerance = 4 * torch.finfo(dtype).eps if name in ("lstm", "gru") else 0.0
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right.cpu(), rtol=tolerance, atol=tolerance)
