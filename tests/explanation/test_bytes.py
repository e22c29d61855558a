"""Bytes that an explanation tells, against what eager runs of the same program move."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from amp_fx.backend.inner import has_cpp_compiler
from amp_fx.errors import ExplainError, OptionError
from amp_fx.explanation.table import bare_op
from amp_fx.weights.store import STORE
from tests import needs
from tests.models.explained import CASES, mlp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.explanation.explanation import Explanation

VIEWS = ("t", "transpose", "view", "_unsafe_view", "permute", "expand", "slice", "select", "split")
CACHED = {"weight_cache": "training"}
"""Casts of weights are cached in graphs with gradients too."""
FREE = (*VIEWS, "unsqueeze", "squeeze", "detach", "alias", "empty", "_reshape_alias", "unbind")


def size(tensor: torch.Tensor) -> int:
    """Memory that a real tensor's elements lie in."""
    whole = tensor.as_strided(
        [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)],
        tensor.stride(),
    )
    return whole.numel() * whole.element_size()


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What eager code hands to kernels: bytes of arguments and of results, by op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in FREE:
            return result
        given, made = (_tensors(args), _tensors(result))
        if name == "embedding":  # reads the rows that it gives, and their numbers
            given = [given[1], *made]
        self.moved[name] += sum(map(size, [*given, *made]))
        return result

    @property
    def casts(self) -> int:
        return self.moved["_to_copy"]

    @property
    def ops(self) -> int:
        return sum(self.moved.values()) - self.casts


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def eager(model: Callable[..., Any], args: Sequence[Any]) -> Ledger:
    ledger = Ledger()
    with torch.autocast("cpu", torch.bfloat16), ledger:
        model(*args)
    return ledger


def moved(explanation: Explanation, *kinds: str) -> int:
    return sum(node.bytes_moved for node in explanation.nodes if node.kind in kinds)


@needs.HOOK
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_eager_autocast(name: str) -> None:
    """Those of ops; of casts, those that were put in, before they are shared and cached."""
    make, args = CASES[name]
    model = make()
    with torch.set_grad_enabled(name in ("mlp", "unet")):
        explanation = amp_fx.explain(model, dtype=torch.bfloat16, options=CACHED)(*args)
        ledger = eager(model, args)
    totals = explanation.totals
    assert totals.num_uncounted == 0
    assert moved(explanation, "op", "island") == ledger.ops
    assert totals.bytes_moved == ledger.ops + totals.bytes_cast
    passes = {each.name: each.bytes_changed for each in explanation.graphs[0].passes}
    assert passes["insert_casts"] == ledger.casts
    assert passes["split"] == -totals.bytes_kept < 0
    assert sum(passes.values()) == totals.bytes_cast == moved(explanation, "cast")


def in_part(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Ops that do not move all that they are given, or give what is expanded."""
    x.index_copy_(0, rows, x[:4] * 2)
    return x[rows].unsqueeze(1).expand(4, 8, 16) + x[0]


def test_what_is_touched_only_in_part() -> None:
    x, rows = torch.randn(100, 16), torch.tensor([1, 2, 3, 4])
    nodes = amp_fx.explain(in_part)(x, rows).nodes
    by_op = {bare_op(n.op): (n.bytes_read, n.bytes_written) for n in nodes if n.bytes_moved}
    numbers, row = 4 * 8, 16 * 4
    assert by_op["index_copy_"] == (numbers + 4 * row, 4 * row)
    assert by_op["getitem"] == (numbers + 4 * row, 4 * row)
    assert by_op["add"] == (4 * row + row, 4 * 8 * row)
    assert not {"unsqueeze", "expand"} & set(by_op)


def test_islands_count_the_casts_inside_of_them() -> None:
    """The kernel of a bilinear layer calls ops that autocast casts."""
    model, x = nn.Bilinear(16, 16, 8), torch.randn(4, 16)
    with torch.no_grad():
        explanation = amp_fx.explain(model, dtype=torch.bfloat16)(x, x)
    [island] = [node for node in explanation.nodes if node.kind == "island"]
    assert island.is_counted
    own = sum(t.numel() for t in (x, model.weight)) * 4
    assert island.bytes_read > own


def test_checkpoints_count_their_bodies() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ w)

        out: torch.Tensor = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return out

    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    explanation = amp_fx.explain(program, dtype=torch.bfloat16)(x, w)
    assert moved(explanation, "op") == eager(program, [x, w]).ops


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
@pytest.mark.parametrize("weight_cache", [False, pytest.param("training", marks=needs.HOOK)])
def test_what_is_saved_is_what_the_compiled_forward_saves(weight_cache: bool | str) -> None:
    """AOTAutograd hands it to the hooks of saved tensors, inputs and cached values among it."""
    model, x = mlp(), torch.randn(8, 16)
    options: dict[str, Any] = {"weight_cache": weight_cache}
    settings = {**options, "dtype": torch.bfloat16}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    explained = amp_fx.explain(model, dtype=torch.bfloat16, backward=True, options=options)(x)
    compiled = torch.compile(model, backend="amp_fx", options=settings)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled(x)
    out.sum().backward()
    cached = [each.value for each in STORE.entries.values() if each.owner.startswith("Sequential")]
    given = {_storage(tensor) for tensor in (x, *model.parameters(), *cached)}
    own = {id(tensor): tensor for tensor in saved if _storage(tensor) not in given}
    assert bool(cached) == bool(weight_cache)
    assert explained.backward_totals.saved_bytes == sum(map(size, own.values()))
    assert {record.dtype for record in explained.backward[0].saved} >= {"bfloat16"}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Looking(nn.Linear):
    """Looks at numbers, so that it is run on real tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum().item() > 0 else -x)


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
def test_kernels_of_real_tensors_are_those_of_fake_ones() -> None:
    options, x = {"products": "low"}, torch.ones(32, 64)
    with torch.no_grad():
        fake, real = (
            amp_fx.explain(kind(64, 64), dtype=torch.bfloat16, fused=True, options=options)(x)
            for kind in (nn.Linear, Looking)
        )
    assert fake.graphs[-1].kernels
    assert real.graphs[-1].kernels == fake.graphs[-1].kernels


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
def test_fused_bytes_of_one_product_are_those_by_hand() -> None:
    x, w, y = 32 * 64, 64 * 64, 32 * 64
    options = {"products": "low"}  # on any CPU
    with torch.no_grad():
        model = nn.Linear(64, 64, bias=False)
        explain = amp_fx.explain(model, dtype=torch.bfloat16, fused=True, options=options)
        totals = explain(torch.randn(32, 64)).totals
    casts = 6 * x + 6 * y  # the weight's is kept
    assert totals.fused_bytes == casts + 2 * (x + w + y)
    assert totals.num_kernels == 3


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW one by one": (torch.optim.AdamW, {"foreach": False}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
}
BY_HAND = {"AdamW fused": 28, "SGD with momentum": 32, "SGD fused": 20}
"""Bytes per parameter: what a fused kernel reads and writes once; of plain SGD the momentum is
scaled, the gradient added, and both are read to write the parameter."""


@needs.HOOK
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_a_step(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    before = copy.deepcopy(model.state_dict())
    explain = amp_fx.explain(model, dtype=torch.bfloat16, optimizer=optimizer, options=CACHED)
    step = explain(x).step
    assert step is not None
    assert not optimizer.state
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    num_parameters = 64 * 64 + 64
    assert (step.num_parameters, step.num_tensors) == (num_parameters, 2)
    assert step.refresh_bytes == 6 * num_parameters
    assert step.bytes_per_parameter * num_parameters == (
        step.bytes_read + step.bytes_written + step.refresh_bytes
    )
    if name in BY_HAND:
        own = (step.bytes_read + step.bytes_written) / num_parameters
        assert own == pytest.approx(BY_HAND[name], abs=0.02)  # and the counts of steps
    states = [v for state in _stepped(optimizer, model).values() for v in state.values()]
    assert step.state_bytes == sum(v.numel() * v.element_size() for v in states if v is not None)


def _stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[Any, dict[str, Any]]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return dict(optimizer.state)


@needs.HOOK
def test_a_step_refreshes_what_is_cached_in_training() -> None:
    """By default nothing on the CPU, and the casts of all weights on an accelerator."""
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters())
    refreshed = {}
    for device in ("cpu", "cuda"):
        explain = amp_fx.explain(model, device_type=device, optimizer=optimizer)
        step = explain(x).step
        assert step is not None
        refreshed[device] = step.refresh_bytes
    assert refreshed == {"cpu": 0, "cuda": 6 * (64 * 64 + 64)}


def test_lists_are_taken_where_the_device_would() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    for device, kind in (("cpu", "for each tensor"), ("cuda", "foreach")):
        explain = amp_fx.explain(
            model, dtype=torch.bfloat16, device_type=device, optimizer=optimizer
        )
        step = explain(x).step
        assert step is not None
        assert step.kind == kind


def test_a_step_that_cannot_be_taken_is_an_error() -> None:
    model = nn.Linear(8, 8)
    explain = amp_fx.explain(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ExplainError, match=r"LBFGS.*closure"):
        explain(torch.randn(4, 8))
    with pytest.raises(OptionError, match="optimizer"):
        amp_fx.explain(model, optimizer="AdamW")  # type: ignore[call-overload]


def test_policies_are_compared_by_bytes() -> None:
    """What one op in another dtype changes, by hand: a softmax in float32."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    policy = amp_fx.Policy.default().with_ops({"softmax": "fp32"})
    low, wide = (
        amp_fx.explain(model, policy=p, dtype=torch.bfloat16)(x) for p in ("torch", policy)
    )
    diff = low.diff(wide)
    [softmax] = diff.nodes
    elements = 8 * 16
    assert softmax.bytes_moved == (2 * elements * 2, 2 * elements * 4)
    before, after = diff.totals["bytes_read"]
    # Read twice as wide; two casts, one of them reads low, one wide.
    assert after - before == 2 * elements + 2 * elements + 4 * elements
    moved_by_module = {path: b - a for path, (a, b) in diff.modules.items()}
    assert sum(moved_by_module.values()) == (wide.totals.bytes_moved - low.totals.bytes_moved)
    assert "bytes in module" in str(diff)
    assert diff.to_dict()["nodes"][0]["bytes_moved"] == list(softmax.bytes_moved)


def test_a_model_on_meta_for_a_device_that_is_not_there() -> None:
    """The same figures as of a real one; of CUDA, norms and losses are in float32."""
    with torch.device("meta"):
        model, x = mlp(), torch.zeros(8, 16)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_type": "cuda", "backward": True}
    meta = amp_fx.explain(model, **options)(x)
    real = amp_fx.explain(mlp(), **options)(torch.zeros(8, 16))
    assert meta.totals == real.totals
    assert meta.backward_totals == real.backward_totals
    assert meta.backward_totals.saved_bytes
    assert "bytes" in str(meta)
    assert "saved" in str(meta)


def test_keys_of_the_dictionary() -> None:
    explain = amp_fx.explain(mlp(), optimizer=torch.optim.SGD(mlp().parameters()), backward=True)
    found = explain(torch.randn(8, 16)).to_dict()
    assert found["step"]["optimizer"] == "SGD"
    assert found["totals"]["bytes_read"]
    assert found["backward_totals"]["saved_bytes"] == sum(
        saved["num_bytes"] for graph in found["graphs"] for saved in graph["saved"]
    )
    assert [each["name"] for each in found["graphs"][0]["passes"]][:2] == [
        "mark_regions",
        "insert_casts",
    ]
