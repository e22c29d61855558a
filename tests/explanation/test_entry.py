"""Explanations, against graphs and eager runs that are independent of them."""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import stats, weight_cache
from amp_fx.backend import backward, compilers
from amp_fx.csrc.guards import add_guards
from amp_fx.errors import ArgumentTypeError, OptionError, PolicyError, UnsupportedError
from amp_fx.explanation.explanation import SCHEMA
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.regions.state import nesting
from amp_fx.torch_private.autocast import with_cuda_regions
from tests import needs
from tests.composed import Composed
from tests.models.explained import CASES, mlp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TO_COPY = torch.ops.aten._to_copy.default


def checkpointed() -> nn.Module:
    layers = {name: nn.Linear(16, 16) for name in ("inner", "last")}
    return Composed(lambda m, x: m.last(checkpoint(m.inner, x, use_reentrant=False)), **layers)


COUNTED = {**CASES, "checkpoint": (checkpointed, (torch.randn(2, 16, requires_grad=True),))}
CACHED = {"weight_cache": "training"}
"""Casts of weights are cached in graphs with gradients too."""


def compiled_casts(
    model: nn.Module, args: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Casts in the graph that the inner compiler gets, and values that a call caches."""
    casts: list[fx.Node] = []

    def compile_inner(gm: fx.GraphModule, *more: Any, **kwargs: Any) -> Callable[..., Any]:
        graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
        casts.extend(n for graph in graphs for n in graph.nodes if n.target is _TO_COPY)
        return compilers.compile_inner(gm, *more, **kwargs)

    weight_cache.clear()
    with monkeypatch.context() as patch:
        patch.setattr(backward, "compile_inner", compile_inner)
        options: dict[str, Any] = {"compiler": "aot_eager", **CACHED}
        torch.compile(model, backend="amp_fx", options=options)(*args)
    return len(casts), len(weight_cache.stats().values)


@pytest.mark.one_in(3)
@needs.HOOK
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("is_training", [True, False])
def test_counts_are_those_of_the_compiled_graph(
    name: str, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, args = COUNTED[name]
    model = make().train(is_training)
    with torch.set_grad_enabled(is_training):
        totals = amp_fx.explain(model, options=CACHED)(*args).totals
        casts, kept = compiled_casts(model, args, monkeypatch)
    assert (totals.casts_left + totals.casts_cached, totals.casts_cached) == (casts, kept)
    assert 0 < kept < casts


@needs.HOOK
@pytest.mark.parametrize("is_training", [True, False])
def test_casts_of_views_of_weights_are_kept(is_training: bool) -> None:
    """A view of a weight changes when the weight does."""
    weight = nn.Parameter(torch.randn(16, 8))
    model = Composed(lambda m, x: x @ m.weight.t()[:, 2:10], weight=weight)
    with torch.set_grad_enabled(is_training):
        explanation = amp_fx.explain(model, options=CACHED)(torch.randn(4, 8))
    states = {cast.source: cast.state for cast in explanation.casts}
    assert states == {"getitem": "cached", "l_x_": "inserted", "matmul": "inserted"}
    assert explanation.totals.copy_bytes == 8 * 8 * 2


def test_casts_that_went_are_told_with_the_reason() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w + (x * 2) @ w

    with torch.no_grad():
        explanation = amp_fx.explain(program)(torch.randn(4, 4), torch.randn(4, 4))
    [removed] = [cast for cast in explanation.casts if cast.state == "removed"]
    [kept] = [cast for cast in explanation.casts if cast.name in removed.removed_by]
    assert removed.removed_by == f"shared with {kept.name}"
    assert (kept.source, kept.state) == (removed.source, "inserted")
    assert explanation.totals.casts_put_in == explanation.totals.casts_left + 1


@needs.HOOK
def test_bytes_of_a_linear_layer() -> None:
    explanation = amp_fx.explain(nn.Linear(4, 8), options=CACHED)(torch.randn(2, 4))
    moved = {(c.weight or c.source): (c.bytes_read, c.bytes_written) for c in explanation.casts}
    assert moved["weight"] == (4 * 8 * 4, 4 * 8 * 2)
    assert moved["bias"] == (8 * 4, 8 * 2)
    assert sorted(moved.values())[1:3] == [(2 * 4 * 4, 2 * 4 * 2), (2 * 8 * 2, 2 * 8 * 4)]
    totals = explanation.totals
    assert totals.copy_bytes == totals.value_bytes == 4 * 8 * 2 + 8 * 2
    assert totals.bytes_saved == 4 * 8 * 6 + 8 * 6


def mixed(model: Any, x: torch.Tensor) -> Any:
    """Products in and out of autocast, and an op of every origin."""
    x = model.low(x)
    with torch.autocast("cpu", enabled=False):
        x = model.full(x.float())
    with torch.autocast("cpu", dtype=torch.float16):
        x = model.other(x)
    return Negated.apply(x.relu())  # type: ignore[no-untyped-call]


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return -x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_origins_modules_and_source_lines() -> None:
    model = Composed(mixed, **{name: nn.Linear(8, 8) for name in ("low", "full", "other")})
    explanation = amp_fx.explain(model)(torch.randn(2, 8, requires_grad=True))
    nodes = {node.module or node.op: node for node in explanation.nodes if node.kind != "weight"}
    found = {name: (node.dtype, node.origin) for name, node in nodes.items()}
    assert found["low"] == ("bfloat16", "table")
    assert found["full"] == ("float32", "region")
    assert found["other"] == ("float16", "table")
    assert found[".relu"] == ("float16", "unlisted")
    assert "cpu float16" in nodes["other"].reason
    [node] = explanation.forward[0].opaque
    assert node.reason == "not rewritten, runs in the dtypes of the program: higher-order op"
    assert nodes[".relu"].file == __file__
    assert "x.relu()" in nodes[".relu"].code


def test_origins_of_policies_of_ones_own() -> None:
    policy = amp_fx.preset("torch").with_ops({"softmax": "fp32"}).with_modules({"1": "fp32"})
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(2, 4)
    for device_type in ("cpu", "cuda"):
        nodes = amp_fx.explain(model, policy=policy, device_type=device_type)(x).nodes
        found = {node.module: (node.dtype, node.origin) for node in nodes if node.kind == "op"}
        assert found["0"] == ("bfloat16", "table")
        assert found["1"] == ("float32", "module '1'")
        assert found["2"] == ("float32", "op 'softmax'")


def test_the_dtype_of_a_policy_is_explained() -> None:
    policy = amp_fx.Policy.default("cuda", dtype="half")
    x = torch.randn(8, 16)
    assert amp_fx.explain(mlp(), policy=policy, device_type="cuda")(x).dtype == "float16"
    assert amp_fx.explain(mlp(), policy=policy)(x).dtype == "bfloat16"
    assert amp_fx.explain(mlp(), policy=policy, device_type="cuda", dtype="bf16")(x).dtype == (
        "bfloat16"
    )


def test_origin_of_a_region_with_a_policy() -> None:
    policy = amp_fx.preset("torch").with_ops({"softmax": "fp32"})

    def program(x: torch.Tensor) -> torch.Tensor:
        with amp_fx.autocast("cpu", policy=policy):
            x = x @ x
        return x @ x

    explanation = amp_fx.explain(program)(torch.randn(4, 4))
    assert [n.origin for n in explanation.nodes if n.kind == "op"] == ["region", "table"]


class Stateful(nn.Module):
    """Changes whatever a model can change in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.seen = nn.BatchNorm1d(8), 0, torch.zeros(1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.last = x
        factor = random.uniform(0, 1) + float(np.random.rand())
        return nn.functional.dropout(self.linear(self.norm(x)), 0.5) * factor


def random_states() -> list[Any]:
    python: Any = random.getstate()
    numpy: Any = np.random.get_state()
    return [python, numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("options", [{}, CACHED])
def test_nothing_of_the_model_or_the_process_changes(options: dict[str, str]) -> None:
    model, x = Stateful(), torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())
    states, graphs = random_states(), stats.snapshot()
    amp_fx.explain(model, backward=True, options=options)(x)
    assert random_states() == states
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert (model.calls, model.seen.item(), hasattr(model, "last")) == (0, 0, False)
    assert stats.snapshot() == graphs
    assert not model.linear.weight.grad_fn


def test_compiled_models_are_neither_recompiled_nor_made_dynamic() -> None:
    seen: list[torch.Size] = []

    def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(next(t.shape for t in inputs if t.shape[1:] == (16,) and t.shape[0] < 16))
        return gm.forward

    model = mlp()
    compiled = torch.compile(model, backend=record)
    compiled(torch.randn(3, 16))
    for size in (4, 5, 6, 7, 8, 9, 10, 11, 12, 13):
        amp_fx.explain(model)(torch.randn(size, 16))
    compiled(torch.randn(3, 16))
    assert seen == [torch.Size([3, 16])]

    torch._dynamo.reset()
    amp_fx.explain(model)(torch.randn(4, 16))
    torch.compile(model, backend=record)(torch.randn(5, 16))
    assert all(type(size) is int for size in seen[-1])


def on_cuda(model: nn.Sequential) -> nn.Sequential:
    """Returns a module with fake CUDA weights; a CPU build can neither move nor initialise such."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(weight.shape, device="cuda"), False))
    return model


@pytest.mark.parametrize("is_fake", [True, False])
def test_models_that_are_not_there(is_fake: bool) -> None:
    """Compares dtypes with those of AutocastCUDA on fake tensors."""
    dtypes: list[str] = []

    def note(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        dtypes.append(str(output.dtype).removeprefix("torch."))

    add_guards()
    with with_cuda_regions(), FakeTensorMode(), torch.no_grad():
        x, model = torch.empty(8, 16, device="cuda"), on_cuda(mlp())
        for child in model:
            child.register_forward_hook(note)
        with torch.autocast("cuda", torch.bfloat16):
            model(x)
        for child in model:
            child._forward_hooks.clear()
    if is_fake:
        explanation = amp_fx.explain(model)(x)
    else:
        with torch.device("meta"):
            explanation = amp_fx.explain(mlp(), device_type="cuda")(torch.empty(8, 16))
    assert (explanation.device_type, explanation.dtype) == ("cuda", "bfloat16")
    assert explanation.is_imagined
    actual = {n.module: n.outputs[0] for n in explanation.nodes if n.kind == "op"}
    assert [actual[str(i)].dtype for i in range(len(model))] == dtypes
    assert {tensor.device for tensor in actual.values()} == {"cuda"}


def test_a_graph_break_and_its_reason() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x @ x
        torch._dynamo.graph_break()
        return x @ x

    explanation = amp_fx.explain(program)(torch.randn(4, 4))
    assert [graph.index for graph in explanation.forward] == [0, 1]
    [reason] = explanation.breaks
    assert "graph_break()" in reason
    assert f"{__file__}:" in reason
    assert explanation.totals.num_breaks == 1
    assert "graph_break()" in str(explanation)


def reads_a_number(x: torch.Tensor) -> torch.Tensor:
    x = x @ x
    return x.relu() if x.sum().item() > 0 else x.sigmoid()


def reads_sizes(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x[x[:, 0] > 0] @ x


@pytest.mark.parametrize("program", [reads_a_number, reads_sizes])
def test_a_program_that_reads_numbers_is_rejected(
    program: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(UnsupportedError, match="depends on values of tensors"):
        amp_fx.explain(program)(torch.randn(4, 4))


def test_a_run_that_fails_leaves_the_state_of_the_thread() -> None:
    """It fails in a transform, in a region, without gradients."""
    num_calls = itertools.count()

    @torch.library.custom_op("amp_fx_tests::marks", mutates_args=())
    def marks(index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(index, 4)

    @marks.register_fake
    def _(index: torch.Tensor) -> torch.Tensor:
        if next(num_calls):  # Dynamo captures the graph in the first call
            return torch.empty(int(index[0]), 4)
        return torch.empty(4, 4, dtype=index.dtype)

    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                factors: torch.Tensor = marks(index)
            return ((x @ x) * factors).sum()

        result: torch.Tensor = torch.func.grad(loss)(x)
        return result

    with pytest.raises(UnsupportedError):
        amp_fx.explain(program)(torch.randn(4, 4), torch.tensor([0, 2, 1, 0]))
    assert nesting() == 0
    assert torch.is_grad_enabled()
    with torch.autograd.graph.save_on_cpu():
        assert torch.ones(2, requires_grad=True).exp().requires_grad


def test_a_fallback_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: InsertCasts, gm: fx.GraphModule) -> None:  # noqa: ARG001
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(InsertCasts, "call", fail)
    explanation = amp_fx.explain(nn.Linear(4, 4))(torch.randn(2, 4))
    assert explanation.totals.num_fallbacks == 1
    assert "on purpose" in explanation.forward[0].fallback
    assert not explanation.casts
    assert "on purpose" in str(explanation)


def test_the_backward_has_the_casts_that_aot_autograd_derives() -> None:
    explanation = amp_fx.explain(nn.Linear(4, 8), backward=True)(torch.randn(2, 4))
    casts = [(cast.from_dtype, cast.to_dtype) for cast in explanation.backward[0].casts]
    # The gradient of the output goes down; those of weight and bias come up.
    assert sorted(casts) == [("bfloat16", "float32")] * 2 + [("float32", "bfloat16")]
    assert not amp_fx.explain(nn.Linear(4, 8))(torch.randn(2, 4)).backward


def test_dictionaries_are_stable_and_survive_json() -> None:
    make, args = CASES["gpt"]
    first, second = (amp_fx.explain(make(), backward=True)(*args) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert str(first) == str(second)
    assert json.loads(first.to_json()) == first.to_dict()
    assert first.to_dict()["schema"] == SCHEMA


def test_settings_of_a_compiled_module_hold() -> None:
    model = nn.Linear(4, 4)
    compiled = amp_fx.compile(model, dtype=torch.float16)
    explanation = amp_fx.explain(compiled)(torch.randn(2, 4))
    assert explanation.dtype == "float16"
    # A region around the call leaves the output low; the bare way in restores it.
    assert explanation.nodes[-1].outputs[0].dtype == "float16"
    assert amp_fx.explain(torch.compile(model))(torch.randn(2, 4)).nodes[-1].outputs[0].dtype == (
        "float32"
    )


def test_an_ambient_region_holds() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        explanation = amp_fx.explain(nn.Linear(4, 4))(torch.randn(2, 4))
    assert explanation.forward[0].autocast == ("cpu float16",)
    assert explanation.dtype == "float16"


def test_wrong_shapes_are_told_by_the_op_and_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"Sequential cannot be traced.*reduction dim"
    ) as raised:
        amp_fx.explain(mlp())(torch.randn(8, 17))
    assert capfd.readouterr().err == ""  # torch logs the traceback of the op
    text = "".join(traceback.format_exception(raised.value))
    assert "from user code" in text
    assert "symbolic_convert.py" not in text  # nor some 80 lines of Dynamo


def test_a_wrong_shape_is_told_in_numbers_after_calls_with_other_shapes() -> None:
    """Dynamo remembers sizes, and gives those that differ a symbol."""
    model = mlp()
    torch.compile(model, backend="eager")(torch.randn(8, 16))
    with pytest.raises(UnsupportedError, match=r"got \[8, 17\] X"):
        amp_fx.explain(model)(torch.randn(8, 17))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def calls_hidden(x: torch.Tensor) -> torch.Tensor:
    return hidden(x)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_copied_or_gives_no_graph() -> None:
    model = mlp()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="Sequential cannot be copied"):
        amp_fx.explain(model)(torch.randn(8, 16))
    with pytest.raises(UnsupportedError, match="no graph"):
        amp_fx.explain(calls_hidden)(torch.randn(4, 4))


def test_arguments_are_checked() -> None:
    x = torch.randn(8, 16)
    with pytest.raises(TypeError, match="dtyp"):
        amp_fx.explain(mlp(), dtyp="bfloat16")  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="expects a module or a function, got 3"):
        amp_fx.explain(3)  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="Linear"):
        amp_fx.explain(nn.Linear)
    with pytest.raises(OptionError, match="cuda, "):
        amp_fx.explain(mlp(), device_type="gpu")(x)
    with pytest.raises(PolicyError, match="torch"):
        amp_fx.explain(mlp(), policy="tork")
    with pytest.raises(OptionError, match="pass dtype as an argument of amp_fx"):
        amp_fx.explain(mlp(), options={"dtype": torch.float16})
    with pytest.raises(OptionError, match="unknown option 'weight_cach'; did you mean"):
        amp_fx.explain(mlp(), options={"weight_cach": False})
    with pytest.raises(OptionError, match="float32"):
        amp_fx.explain(mlp(), dtype=torch.float32)(x)


def test_a_banned_op_is_told_as_autocast_tells_it() -> None:
    with pytest.raises(UnsupportedError, match="binary_cross_entropy_with_logits"):
        amp_fx.explain(nn.BCELoss(), device_type="cuda")(torch.rand(4), torch.rand(4))
