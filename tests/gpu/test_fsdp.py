"""FSDP2 on the device: bit for bit eager autocast in the same wrapper.

Each rank needs a separate device, so there is one rank. It gathers and scatters alone, on FSDP2's
streams. ``tests/distributed`` runs several ranks on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import amp_fx
from tests.distributed.fsdp_cases import CAN_TELL_APART
from tests.distributed.nets import make_net
from tests.gpu.place import DEVICE, IS_EMULATED, MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
pytestmark = [
    *MARKS,
    pytest.mark.skipif(IS_EMULATED, reason="needs a GPU: NCCL"),
    pytest.mark.skipif(
        not IS_EMULATED and not getattr(dist, f"is_{BACKEND}_available", bool)(),
        reason=f"needs {BACKEND}",
    ),
]

WIDTH = 64
NUM_UPDATES = 4
CACHED = {"compiler": "aot_eager", "fallback": False, "weight_cache": "training"}


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    dist.init_process_group(BACKEND, init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def own_policy(model: nn.Module) -> Any:
    """Gathers weights in the dtypes that the program reads them in."""
    with torch.device("meta"):
        explanation = amp_fx.explain(make_net(WIDTH))(torch.empty(4, 16))
    return amp_fx.fsdp_policy(model, explanation)


def train(*, is_compiled: bool, gathers_low: bool = False) -> list[torch.Tensor]:
    """Returns the losses, and the gradients of the last update."""
    torch._dynamo.reset()
    model = make_net(WIDTH).to(DEVICE)
    options: dict[str, Any] = {"mp_policy": own_policy(model)} if gathers_low else {}
    for part in (*model.blocks, model.first, model.last):
        if is_compiled:
            part.compile(backend="amp_fx", options=CACHED)
        fully_shard(part, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(update)
        x, y = (torch.randn(4, n, generator=generator).to(DEVICE) for n in (16, 8))
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.detach())
    grads = [parameter.grad for parameter in model.parameters()]
    return [*found, *(grad.full_tensor() for grad in grads)]  # type: ignore[union-attr]


@pytest.mark.parametrize("gathers_low", [False, True])
def test_bits_of_eager_autocast(gathers_low: bool) -> None:
    if gathers_low and not CAN_TELL_APART:
        pytest.skip("needs a torch whose FSDP2 tells parameters apart")
    expected = train(is_compiled=False)
    found = train(is_compiled=True, gathers_low=gathers_low)
    assert len(found) == len(expected) > NUM_UPDATES
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
