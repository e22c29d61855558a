"""``amp_fx.verify``: programs that have eager autocast's bits, and planted differences."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

import amp_fx
from amp_fx.backend import compilers
from amp_fx.commands.cli import main
from amp_fx.devices import wide_products
from amp_fx.errors import ArgumentTypeError, OptionError
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import set_value
from amp_fx.numerics.equality import compare
from amp_fx.passes.base import PassResult
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.weights.store import Store
from tests import needs
from tests.composed import Composed

INDUCTOR = needs.CPP_COMPILER
EAGER: dict[str, Any] = {"compiler": "eager"}
aten = torch.ops.aten


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Linear(32, 16),
        nn.Tanh(),
        nn.Linear(16, 8),
    )


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 16), generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass(frozen=True)
class Planted:
    """Changes every call whose target has a name; the change is the fault to be found."""

    target: str
    how: str
    name: ClassVar[str] = "planted"

    def call(self, gm: fx.GraphModule) -> PassResult:
        counts: Counter[str] = Counter()
        for node in list(gm.graph.nodes):
            if getattr(node.target, "__name__", "") == self.target:
                getattr(self, self.how)(gm.graph, node)
                counts["planted"] += 1
        return PassResult(counts)

    def other(self, _: fx.Graph, node: fx.Node) -> None:
        node.target = torch.sin

    def tanh_form(self, _: fx.Graph, node: fx.Node) -> None:
        node.kwargs = {**node.kwargs, "approximate": "tanh"}

    def eps(self, _: fx.Graph, node: fx.Node) -> None:
        *args, _old = node.args
        node.args = (*args, 1e-2)

    def after(self, graph: fx.Graph, node: fx.Node, function: Any, *args: Any) -> None:
        with graph.inserting_after(node):
            new = graph.call_function(function, (node, *args))
        new.meta = dict(node.meta)
        value = VALUE.get(node)  # None before casts are inserted
        set_value(new, None if value is None else function(value, *args))
        node.replace_all_uses_with(new, lambda user: user is not new)

    def rounded(self, graph: fx.Graph, node: fx.Node) -> None:
        self.after(graph, node, _through_float8)

    def shifted(self, graph: fx.Graph, node: fx.Node) -> None:
        self.after(graph, node, torch.add, 2**-6)

    def wide(self, graph: fx.Graph, node: fx.Node) -> None:
        self.after(graph, node, torch.Tensor.float)

    def scaled(self, graph: fx.Graph, node: fx.Node) -> None:
        self.after(graph, node, torch.mul, 1 + 2**-7)


def _through_float8(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float8_e5m2).to(value.dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("target", "how", "op", "module"),
    [
        ("gelu", "tanh_form", "gelu", "1"),
        ("gelu", "rounded", "", "1"),
        ("layer_norm", "eps", "layer_norm", "2"),
        ("layer_norm", "shifted", "", "2"),
        ("tanh", "other", "", "4"),
        ("tanh", "scaled", "", "4"),
    ],
)
def test_a_pass_that_changes_bits_is_named_with_its_node(
    target: str, how: str, op: str, module: str
) -> None:
    options = {**EAGER, "passes": (Planted(target, how),)}
    report = amp_fx.verify(net(), options=options)(x())
    assert report.cause == "the pass planted"
    assert report.remedy == {"disable_passes": ("planted",)}
    assert report.first is not None
    assert report.first.module == module
    assert not op or report.first.op == op
    assert amp_fx.verify(net(), options={**options, **report.remedy})(x()).is_equal


@needs.HOOK
def test_a_cached_value_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Store._recompute

    def wrong(*args: Any) -> list[Any]:
        return [value.mul_(1 + 2**-7) for value in made(*args)]

    monkeypatch.setattr(Store, "_recompute", wrong)
    options = {"compiler": "aot_eager", "weight_cache": "training"}
    report = amp_fx.verify(net(), options=options)(x())
    assert "cached value" in report.cause
    assert report.remedy == {"compiler": "aot_eager", "weight_cache": False}
    assert amp_fx.verify(net(), options={**options, **report.remedy})(x()).is_equal


def twice(model: Any, x: torch.Tensor) -> Any:
    """Uses a weight on both sides of a graph break."""
    y = torch.tanh(model.linear(x))
    torch._dynamo.graph_break()
    return model.linear(y)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
def test_a_weight_that_several_graphs_cast_is_named() -> None:
    """Eager autocast adds its gradients in low precision, graphs in float32."""
    torch.manual_seed(0)
    model = Composed(twice, linear=nn.Linear(16, 16))
    report = amp_fx.verify(model, options=EAGER)(torch.randn(8, 16))
    names = {each.what for each in report.differences}
    assert names == {"gradient of linear.weight", "gradient of linear.bias"}
    assert "a weight that several graphs cast" in report.cause


@INDUCTOR
def test_generated_code_of_an_op_is_named() -> None:
    report = amp_fx.verify(nn.Sequential(nn.Tanh(), nn.GELU(), nn.Tanh()))(x())
    assert report.first is not None
    assert report.first.op in ("tanh", "gelu")
    assert "generated code" in report.cause
    assert report.remedy == {"numerics": "eager"}


@INDUCTOR
@pytest.mark.parametrize(
    ("numerics", "stage"),
    [
        pytest.param("eager", "forward", marks=pytest.mark.slow),
        pytest.param("strict", "forward", marks=pytest.mark.slow),
        ("strict", "backward"),
    ],
)
def test_a_wrong_lowering_is_found(numerics: str, stage: str) -> None:
    def change(graph: fx.Graph) -> None:
        is_backward = not any(graph.find_nodes(op="call_function", target=aten.relu.default))
        if is_backward == (stage == "backward"):
            for node in graph.find_nodes(op="call_function", target=aten.neg.default):
                node.target = aten.abs.default

    options = {"numerics": numerics, "post_grad_custom_post_pass": change, "fx_graph_cache": False}
    torch.manual_seed(0)
    linears = {name: nn.Linear(16, 16, bias=False) for name in ("up", "down")}
    model = Composed(
        lambda m, x: m.down(m.up(x).relu().neg()), **linears
    )  # compiled to ATen's bits
    report = amp_fx.verify(model, options=options)(x())
    assert report.first is not None
    assert (report.first.stage, report.first.op) == (stage, "neg")
    assert "inductor" in report.cause
    if stage == "forward":
        assert report.remedy == {"compiler": "aot_eager"}
    else:
        assert all(each.what.startswith("gradient") for each in report.differences)


@pytest.mark.slow
@INDUCTOR
def test_wide_products_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "has_product_kernels", lambda _: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        report = amp_fx.verify(model, dtype="float16")(x(64, 512))
    if report.is_equal:
        pytest.skip("sums of float16 are the same ones here")
    assert "product" in report.cause
    assert report.remedy == {"numerics": "strict"}


@INDUCTOR
@needs.PACKING
def test_frozen_epilogues_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        report = amp_fx.verify(model, options={"numerics": "default"})(x(8, 64))
        assert not report.is_equal
        assert amp_fx.verify(model, options=report.remedy)(x(8, 64)).is_equal


@pytest.mark.slow
@INDUCTOR
def test_random_numbers_of_inductor_are_found() -> None:
    report = amp_fx.verify(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))(x())
    assert report.first is not None
    assert report.first.op == "dropout"
    assert report.remedy == {"numerics": "eager"}


def test_what_autograd_does_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it = compilers.compile_with_aot_eager

    def wrong(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        Planted("tanh", "other").call(gm)
        gm.recompile()
        return compile_it(gm, *args, **kwargs)

    monkeypatch.setattr(compilers, "compile_with_aot_eager", wrong)
    report = amp_fx.verify(net(), options={"compiler": "aot_eager"})(x())
    assert "AOTAutograd" in report.cause
    assert report.remedy == {"compiler": "eager"}
    assert report.first is not None
    assert (report.first.stage, report.first.module) == ("forward", "4")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("target", "how", "module"), [("gelu", "rounded", "1"), ("tanh", "other", "4")]
)
def test_a_needed_pass_is_told_from_dynamo(
    monkeypatch: pytest.MonkeyPatch, target: str, how: str, module: str
) -> None:
    call = InsertCasts.call

    def wrong(self: InsertCasts, gm: fx.GraphModule) -> PassResult:
        Planted(target, how).call(gm)
        return call(self, gm)

    monkeypatch.setattr(InsertCasts, "call", wrong)
    model = net()
    report = amp_fx.verify(model, options=EAGER)(x())
    assert "insert_casts" in report.cause
    assert not report.remedy
    assert report.first is not None
    assert report.first.module == module
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compile(model, backend=backend)(x())
    assert graphs  # all the compilations of verify leave those that Dynamo allows


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=[INDUCTOR, pytest.mark.slow])]
)
def test_equal_programs_are_said_to_be_equal(compiler: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm, self.drop = net(), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.calls = 0

        def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, Any]:
            self.calls += 1
            y = self.net(x) * self.calls
            torch._dynamo.graph_break()
            return {"logits": self.norm(y), "others": [self.drop(y) * scale, y.argmax(-1)]}

    options = {"numerics": "eager"} if compiler == "inductor" else EAGER
    model = Two()
    report = amp_fx.verify(model, options=options)(x().requires_grad_(), scale=0.5)
    assert report.is_equal, report
    assert model.calls == 0
    assert report.num_compared > 15
    assert report.first is None
    assert not report.cause
    assert "are equal to eager autocast's" in str(report)


def test_steps_of_an_optimizer_are_compared_and_undone() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(x()).sum().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    grads = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    report = amp_fx.verify(model, options=EAGER, optimizer=optimizer, steps=2)(x())
    assert report.is_equal
    assert json.dumps(report.to_dict())
    for name, value in before[0].items():
        assert torch.equal(value, model.state_dict()[name])
    state = optimizer.state_dict()["state"]
    assert all(
        torch.equal(value, state[i][k])
        for i, own in before[1]["state"].items()
        for k, value in own.items()
    )
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
def test_what_a_step_knows_by_itself_is_compared_and_put_back() -> None:
    torch.manual_seed(0)
    up, down, shift = nn.Linear(16, 8), nn.Linear(8, 16), torch.randn(16, requires_grad=True)

    def draw() -> float:
        return random.random()

    chance: Any = torch.compiler.disable(draw)  # type: ignore[no-untyped-call]

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = down(up(x)) * chance() + shift
        return y

    leaves = [*up.parameters(), *down.parameters(), shift]
    before = [leaf.detach().clone() for leaf in leaves]
    optimizer = torch.optim.SGD(leaves, lr=0.1)
    group = optimizer.param_groups[0]
    report = amp_fx.verify(step, options=EAGER, optimizer=optimizer, steps=2)(x())
    assert report.is_equal, report
    assert report.num_compared == 2 * (1 + 5 + 1 + 5)  # output, gradients, input, leaves
    assert all(map(torch.equal, before, leaves))
    assert all(leaf.grad is None for leaf in leaves)
    assert optimizer.param_groups[0] is group


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("way", ["torch", "amp_fx"])
def test_options_are_those_of_what_is_given(way: str, is_function: bool) -> None:
    model = net()

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    step: Any = function if is_function else model
    options = {**EAGER, "passes": (Planted("tanh", "other"),)}
    if way == "torch":
        compiled: Any = torch.compile(step, backend="amp_fx", options=options)
    else:
        compiled = amp_fx.compile(step, options=options, dtype="float16")
    report = amp_fx.verify(compiled)(x())
    assert report.cause == "the pass planted"
    assert report.dtype == ("bfloat16" if way == "torch" else "float16")
    assert amp_fx.verify(compiled, options={"passes": ()})(x()).is_equal


def test_what_is_not_compiled_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    report = amp_fx.verify(net(), options=EAGER)(x())
    assert not report.is_equal
    assert "nothing is verified" in str(report)
    assert report.to_dict()["num_graphs"] == 0


@pytest.mark.slow
def test_a_write_that_no_call_sees_is_found_in_the_second_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of the optimizer's step, computed with as if they were not written."""
    made = Store._recompute

    def made_once(self: Any, entries: Any, sources: Any, olds: Any) -> list[Any]:
        new = made(self, entries, sources, [None] * len(entries))
        return [value if old is None else old for value, old in zip(new, olds, strict=True)]

    monkeypatch.setattr(Store, "_recompute", made_once)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"compiler": "aot_eager", "weight_cache": "training"}
    report = amp_fx.verify(model, options=options, optimizer=optimizer, steps=2)(x())
    assert report.differences[0].what == "output 0 in step 2"
    assert report.remedy["weight_cache"] is False


def test_a_loss_can_be_given_and_dtypes_count() -> None:
    report = amp_fx.verify(net(), options=EAGER, loss=lambda y: y.float().square().mean())(x())
    assert report.is_equal
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    report = amp_fx.verify(model, options={**EAGER, "passes": (Planted("tanh", "wide"),)})(x(2, 4))
    assert "instead of torch.bfloat16" in str(report)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_batches_of_worker_processes() -> None:
    """An iterator of the step starts anew in each run; one from outside goes on."""
    data = torch.utils.data.TensorDataset(torch.randn(16, 16))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=2)
    model, batches = net(), iter(loader)
    assert amp_fx.verify(lambda: model(next(iter(loader))[0]), options=EAGER)().is_equal
    report = amp_fx.verify(lambda: model(next(batches)[0]), options=EAGER)()
    assert report.cause == "eager code gives other bits in every run: nothing can be compared"


def test_what_eager_code_does_not_repeat_is_said() -> None:
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    report = amp_fx.verify(forward, options=EAGER)(x())
    assert "every run" in report.cause


@pytest.mark.parametrize(
    ("left", "right", "ulps"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, float("nan")], [1.0, float("nan")], None),
        ([1.0], [1.0078125], 1),
        ([-0.0, 1.0], [0.0, 1.0], 0),
        ([2.0**-133], [-(2.0**-133)], 2),
    ],
)
def test_distances_are_counted_in_units_of_the_last_place(
    left: list[float], right: list[float], ulps: int | None
) -> None:
    found = compare("y", torch.tensor(left).bfloat16(), torch.tensor(right).bfloat16())
    assert (found and found.ulps) == ulps


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="expects a module or a function"):
        amp_fx.verify(nn.Linear)
    with pytest.raises(OptionError, match="not an optimizer"):
        amp_fx.verify(net(), optimizer=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="at least one step"):
        amp_fx.verify(net(), optimizer=torch.optim.SGD(net().parameters()), steps=0)
    with pytest.raises(OptionError, match="unknown option"):
        amp_fx.verify(net(), options={"numeric": "eager"})


def test_the_command_says_it_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "torch.nn:Tanh", "--input-shape", "4,8", "--option", "compiler=eager"]
    assert main(arguments) == 0
    assert "are equal" in capsys.readouterr().out
    assert main([*arguments, "--option", "nothing"]) == 2
    arguments = ["verify", "tests.numerics.test_verify:net", "--option", "compiler=eager"]
    arguments += ["--input-shape", "4,16", "--optimizer", "SGD", "--steps", "2"]
    assert main(arguments) == 0
    assert "all 36 tensors" in capsys.readouterr().out
