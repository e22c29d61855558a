"""Bodies of ``nested_compile_region`` run as if they were inlined, and are compiled once."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.graphs.bodies import graphs_in
from amp_fx.passes.base import PassResult
from amp_fx.policies.policy import preset

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, fx

    Modules = nn.ModuleList
    Program = Callable[[Any, Tensor], Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of the regions

region = torch.compiler.nested_compile_region
FLOAT32_GELU = preset("torch").with_ops({"gelu": "fp32"})
FLOAT32_LINEAR = preset("torch").with_ops({"linear": "fp32"})


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    @region
    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    @region
    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    @region
    def forward(self, x: Tensor) -> Any:
        return self.norm(self.linear(x))  # writes the running statistics


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def float16() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


@region
def called(module: nn.Module, x: Tensor) -> Any:
    return module(x)


@region
def with_regions(module: nn.Module, x: Tensor) -> Any:
    with float16():
        x = module(x)
    with off():
        return module(x.float())


@region
def lowered(x: Tensor, w: Tensor) -> Any:
    return x.to(torch.bfloat16), x @ w  # the first is ``x`` itself if ``x`` is bfloat16


def chain(modules: Modules, x: Tensor) -> Any:
    for module in modules:
        x = module(x)
    return x


def one_body_three_times(modules: Modules, x: Tensor) -> Any:
    return modules[0](modules[0](modules[0](x))), modules[0](x)


def disabled(modules: Modules, x: Tensor) -> Any:
    with off():
        y = modules[1](modules[0](x))
    return y, modules[1](modules[0](y))


def regions(modules: Modules, x: Tensor) -> Any:
    with bfloat16():
        a = modules[0](x)
    with float16():
        b = modules[1](x)
    with off():
        c = modules[1](x)
    return a, b, c, modules[2](x)


def policies(modules: Modules, x: Tensor) -> Any:
    if not torch.compiler.is_compiling():  # eager code follows no policy: by hand
        first: Any = modules[0]
        with bfloat16():
            a = first.down(F.gelu(first.up(x).float()))
        with off():
            b = modules[1](x)
        return a, b, modules[2](x)
    with amp_fx.autocast("cpu", torch.bfloat16, policy=FLOAT32_GELU):
        a = modules[0](x)
    with amp_fx.autocast("cpu", torch.bfloat16, policy=FLOAT32_LINEAR):
        b = modules[1](x)
    return a, b, modules[2](x)


def without_gradients(modules: Modules, x: Tensor) -> Any:
    with torch.no_grad():
        a = modules[1](modules[0](x).float())
    return a, modules[1](x), modules[2](x)


def functions(modules: Modules, x: Tensor) -> Any:
    for module in (*modules, *modules):
        x = called(module, x)
    return x


def checkpoints(modules: Modules, x: Tensor) -> Any:
    for module in (*modules, *modules):
        x = checkpoint(called, module, x, use_reentrant=False)
    return called(modules[0], x)


def branches(modules: Modules, x: Tensor) -> Any:
    return torch.cond(
        x.sum() > -1e9,
        lambda y: modules[1](modules[0](modules[0](y))).sin(),
        lambda y: modules[0](y).cos(),
        (x,),
    )


def regions_inside(modules: Modules, x: Tensor) -> Any:
    return with_regions(modules[1], with_regions(modules[0], x)), with_regions(modules[0], x)


def aliases(modules: Any, x: Tensor) -> Any:
    w = modules[0].down.weight @ modules[0].up.weight
    a, b = lowered(x, w)
    c, d = lowered(b, w)
    e, f = lowered(d, w)
    return a, b, c, d, e, f


PROGRAMS: dict[str, tuple[Program, Callable[[], nn.Module]]] = {
    "three bodies": (chain, Mlp),
    "one body": (one_body_three_times, Mlp),
    "bodies in bodies": (chain, Pair),
    "writes": (chain, Normalized),
    "disabled regions": (disabled, Mlp),
    "regions": (regions, Mlp),
    "policies": (policies, Mlp),
    "no_grad": (without_gradients, Mlp),
    "functions": (functions, lambda: nn.Linear(8, 8)),
    "checkpoints": (checkpoints, lambda: nn.Linear(8, 8)),
    "branches": (branches, Mlp),
    "regions inside": (regions_inside, lambda: nn.Linear(8, 8)),
    "aliases": (aliases, Mlp),
}


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program, kind = PROGRAMS[name]
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.program(self.blocks, x)


def run(net: Net, call: Callable[[Tensor], Any], *, is_trained: bool) -> list[Tensor]:
    """Returns the results, gradients and buffers of two calls."""
    found: list[Tensor] = []
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        net.zero_grad()
        with torch.set_grad_enabled(is_trained):
            results = call(x)
            results = results if isinstance(results, tuple) else (results,)
            if is_trained:
                losses = [y.float().square().sum() for y in results if y.requires_grad]
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        found += [y.detach() for y in results]
        found += [p.grad for p in net.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in net.buffers()]
    return found


def in_region(net: Net, dtypes: list[torch.dtype]) -> Callable[[Tensor], Any]:
    """Eager autocast around a model, with results in other dtypes."""

    def call(x: Tensor) -> Any:
        with bfloat16():
            results = net(x)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(y.to(dtype) for y, dtype in zip(results, dtypes, strict=True))

    return call


def dtypes_of(net: Net) -> list[torch.dtype]:
    results = copy.deepcopy(net)(torch.ones(4, 8))
    return [y.dtype for y in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bare_calls_have_the_bits_of_eager_autocast(
    name: str, is_trained: bool, compiler: str
) -> None:
    if name == "aliases" and is_trained and compiler == "aot_eager":
        pytest.skip("torch adds up the gradients of a body before it adds those of other calls")
    net = Net(name)
    call = in_region(net, dtypes_of(net))
    expected = run(net, call, is_trained=is_trained)
    net = Net(name)
    options: dict[str, Any] = {"compiler": compiler}
    call = torch.compile(net, backend="amp_fx", options=options, fullgraph=True)
    found = run(net, call, is_trained=is_trained)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_has_eager_bits(name: str, is_trained: bool) -> None:
    net = Net(name)
    call = in_region(net, dtypes_of(net))
    expected = run(net, call, is_trained=is_trained)
    net = Net(name)
    call = torch.compile(net, backend="amp_fx", options={"numerics": "eager"}, fullgraph=True)
    found = run(net, call, is_trained=is_trained)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
def test_bodies_of_inductor_get_operands_of_their_dtypes() -> None:
    net = nn.Sequential(Mlp(), Mlp(), Mlp())
    x = torch.randn(4, 8)
    with torch.no_grad():
        with bfloat16():
            expected = net(x)
        found = torch.compile(net, backend="amp_fx")(x)
    torch.testing.assert_close(found, expected.float(), rtol=2e-2, atol=2e-3)


class Bodies:
    """Counts the bodies that calls share, and the calls."""

    name = "count_bodies"
    cache_key = ""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, gm: fx.GraphModule) -> PassResult:
        op = torch.ops.higher_order.invoke_subgraph
        for graph in graphs_in(gm):
            self.calls += [str(n.args[1]) for n in graph.find_nodes(op="call_function", target=op)]
        return PassResult(Counter())


@pytest.mark.parametrize(
    ("num_layers", "policy", "num_calls", "num_bodies"),
    [
        (5, None, 4, 1),  # the first call gets float32, and is inlined as it is the only one
        (5, {"3": "fp32"}, 4, 2),  # layers 0 and 4 get float32, 1 and 2 get bfloat16
        (6, {"1": "fp32", "2": "fp32"}, 4, 2),  # layers 0 and 3, 4 and 5
    ],
)
def test_equal_calls_share_a_body(
    num_layers: int, policy: dict[str, str] | None, num_calls: int, num_bodies: int
) -> None:
    net, bodies = nn.Sequential(*(Mlp() for _ in range(num_layers))), Bodies()
    options: dict[str, Any] = {"compiler": "aot_eager", "passes": [bodies]}
    if policy is not None:
        options["policy"] = preset("torch").with_modules(policy)
    with torch.no_grad():
        torch.compile(net, backend="amp_fx", options=options)(torch.randn(4, 8))
    assert len(bodies.calls) == num_calls
    assert len(set(bodies.calls)) == num_bodies


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_policies_of_modules_apply_to_the_module_that_is_called(
    compiler: str, is_function: bool
) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for name in "abcd":
                self.add_module(name, nn.Linear(8, 8) if is_function else Mlp())

        def forward(self, x: Tensor) -> Any:
            for name in "abcd":
                module = getattr(self, name)
                with torch.autocast("cpu", enabled=name != "b" or not in_eager):
                    x = called(module, x.float()) if is_function else module(x.float())
            return x

    in_eager = True
    net, x = Named(), torch.randn(4, 8)
    with torch.no_grad(), bfloat16():
        expected = net(x)
    in_eager = False
    options: dict[str, Any] = {
        "compiler": compiler,
        "policy": preset("torch").with_modules({"b": "fp32"}),
    }
    with torch.no_grad(), bfloat16():
        found = torch.compile(net, backend="amp_fx", options=options)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WEIGHTS = ("up.weight", "up.bias", "down.weight", "down.bias")


@pytest.mark.parametrize("training", [False, True])
def test_weights_in_bodies_are_cached(training: bool) -> None:
    net = nn.Sequential(*(Mlp() for _ in range(4)))
    options: dict[str, Any] = {"compiler": "aot_eager", "weight_cache": "training"}
    compiled = torch.compile(net, backend="amp_fx", options=options)
    x = torch.randn(4, 8)
    with torch.set_grad_enabled(training):
        compiled(x)
        compiled(x)
        with torch.no_grad():
            net.get_parameter("2.up.weight").zero_()
        found = compiled(x)
        with bfloat16():
            expected = net(x)
    names = {name for entry in weight_cache.stats().values for name in entry.weights}
    assert {f"{layer}.{name}" for layer in range(4) for name in WEIGHTS} <= names
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_dynamic_shapes(compiler: str) -> None:
    net = nn.Sequential(*(Mlp() for _ in range(3)))
    options: dict[str, Any] = {"compiler": compiler}
    compiled = torch.compile(net, backend="amp_fx", options=options)
    for rows in (3, 4, 7):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            with bfloat16():
                expected = net(x)
            found = compiled(x)
        torch.testing.assert_close(found, expected.float(), rtol=0, atol=0)


@pytest.mark.falls_back
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_graphs_that_fall_back_have_the_bits_of_eager_autocast(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> PassResult:
        raise RuntimeError("no casts today")

    monkeypatch.setattr("amp_fx.passes.insert_casts.InsertCasts.call", fail)
    net, x = nn.Sequential(*(Mlp() for _ in range(3))), torch.randn(4, 8)
    with torch.no_grad():
        with bfloat16():
            expected = net(x)
        found = torch.compile(net, backend="amp_fx", options={"compiler": compiler})(x)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=0)
