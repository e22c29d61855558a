"""Steps that are hard to run twice: each tool examines them, and leaves the state as it was."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Step = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(F.gelu(self.bn(self.a(x))))
        return result


def trains_itself(net: Net) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        net.optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = F.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        net.optimizer.step()
        return loss.detach()

    return step


def changes_its_batch(net: Net) -> Step:
    return lambda x, y: F.cross_entropy(net(x.mul_(2)), y.add_(1).remainder_(4))


def breaks_the_graph(net: Net) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = net.a(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(net.b(F.gelu(net.bn(hidden))), y)

    return step


def has_a_compiled_part(net: Net) -> Step:
    net.a.compile(backend="eager")
    return lambda x, y: F.cross_entropy(net(x), y)


def multiplies_sparse(net: Net) -> Step:
    matrix = torch.eye(8).to_sparse()
    return lambda x, y: F.cross_entropy(net(torch.sparse.mm(matrix, x.T).T), y)


def nests(net: Net) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor([x[:2], x[2:]])
        rows: Tensor = net.a(nested).to_padded_tensor(0.0)
        return rows.square().mean() + 0 * y.sum()

    return step


def saves_memory(net: Net) -> Step:
    return lambda x, y: F.cross_entropy(_tensor(checkpoint(net, x, use_reentrant=False)), y)


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def is_distributed(net: Net) -> Step:
    mesh = init_device_mesh("cpu", (1,))
    distribute_module(net.a, mesh)

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = net.a(DTensor.from_local(x, mesh, [Replicate()])).to_local()
        return F.cross_entropy(net.b(F.gelu(net.bn(hidden))), y)

    return step


def has_a_sparse_gradient(net: Net) -> Step:
    net.bag = bag = nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
    optimizers = [net.optimizer, torch.optim.SparseAdam([bag.weight])]
    rows = torch.randint(0, 50, (6, 5))

    def step(x: Tensor, y: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = F.cross_entropy(net(bag(rows) + x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def penalizes_gradients(net: Net) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = F.cross_entropy(net(x).float(), y)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    return step


def writes_views_of_a_parametrization(net: Net) -> Step:
    spectral_norm(net.a)
    return lambda x, y: F.cross_entropy(net(x), y)


STEPS: dict[Callable[[Net], Step], str] = {
    trains_itself: "",
    changes_its_batch: "",
    breaks_the_graph: "",
    has_a_compiled_part: "",
    multiplies_sparse: "sparse",
    nests: "nested",
    saves_memory: "",
    is_distributed: "DTensor",
    has_a_sparse_gradient: "aten::_embedding_bag_backward",
    penalizes_gradients: "",
    writes_views_of_a_parametrization: "",
}
"""Makers of steps, and what the report lists as not examined."""
CAPTURED = [*STEPS][:-3]
"""Steps that Dynamo captures, which a search needs."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    path = (tmp_path / "store").as_uri()
    dist.init_process_group("gloo", init_method=path, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def state_of(net: Net, args: tuple[Tensor, ...]) -> Any:
    tensors = [*net.state_dict().values(), *args, torch.get_rng_state()]
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    grads = [id(p.grad) for p in net.parameters()]
    return [t.tolist() for t in locals_], grads, dict(net.optimizer.state)


TOOLS: dict[str, Callable[[Any], Any]] = {
    "accuracy": amp_fx.accuracy,
    "audit": amp_fx.audit,
    "record": amp_fx.record,
    "search": lambda step: amp_fx.search(step, tolerance=0.2),
}


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("make", "tool"),
    [(make, tool) for make in STEPS for tool in TOOLS if tool != "search" or make in CAPTURED],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_step_is_examined_and_its_state_is_as_before(
    make: Callable[[Net], Step], tool: str
) -> None:
    expected = make(Net())
    with torch.autocast("cpu"):
        loss = float(expected(*batch()).detach())
    net, args = Net(), batch()
    step, before = make(net), state_of(net, args)
    report = TOOLS[tool](step)(*args)
    assert state_of(net, args) == before
    if tool == "accuracy":
        assert report.loss == loss
        assert report.suspects == ()
        listed = " ".join(each.op for each in report.not_examined)
        assert STEPS[make] in listed
        assert bool(listed) == bool(STEPS[make])


@pytest.mark.parametrize("tool", TOOLS)
def test_after_an_interruption_the_state_is_as_before(tool: str) -> None:
    net, args = Net(), batch()
    train = trains_itself(net)

    def step(x: Tensor, y: Tensor) -> Tensor:
        train(x.mul_(2), y)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was not interrupted")

    before = state_of(net, args)
    with pytest.raises(KeyboardInterrupt):
        TOOLS[tool](step)(*args)
    assert state_of(net, args) == before
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("tool", TOOLS)
def test_a_generator_of_the_step_is_as_before(tool: str) -> None:
    net, args, generator = Net(), batch(), torch.Generator()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x + torch.randn(x.shape, generator=generator)), y)

    before = generator.get_state()
    TOOLS[tool](step)(*args)
    assert torch.equal(generator.get_state(), before)
