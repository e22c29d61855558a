"""Low products that are computed in float32: their numbers, and which ones are."""

from __future__ import annotations

import copy
import os
import platform
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from amp_fx import stats, weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.disk_caches import keyed
from amp_fx.devices import wide_products
from amp_fx.options import Options
from amp_fx.passes.widen_products import KINDS
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")

aten = torch.ops.aten
FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16


class WidelyByHand(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Eager code whose low products are sums in float32 of what they get, rounded once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_own = KINDS.get(func) == "attention" and args[0].dtype is BFLOAT16
        if func not in KINDS or is_own:
            return func(*args, **(kwargs or {}))
        wide = func(*[a.float() if is_low(a) else a for a in args], **(kwargs or {}))
        low = func(*args, **(kwargs or {}))  # for its dtypes
        if isinstance(wide, torch.Tensor):
            return wide.to(low.dtype)
        pairs = zip(wide, low, strict=True)
        return tuple(None if w is None else w.to(like.dtype) for w, like in pairs)


def is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (FLOAT16, BFLOAT16)


@pytest.fixture
def _no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without units for low dtypes."""
    monkeypatch.setattr(wide_products, "has_product_kernels", lambda _: False)


@pytest.fixture
def _all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with units for both."""
    monkeypatch.setattr(wide_products, "has_product_kernels", lambda _: True)


class Linears(nn.Module):
    """Nothing but products: each rounds what it gets and what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=i == 1) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            layer(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        return functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linears": (Linears, (64, 32)),
    "attention": (Attention, (2, 64, 32)),
}


def results(program: Callable[..., Any], model: nn.Module, x: torch.Tensor, dtype: Any) -> Any:
    """Returns the output and all gradients, those small that a low dtype flushes and rounds."""
    with torch.autocast("cpu", dtype):
        out = program(x)
    (out.float() ** 2).mean().mul(1e-2).backward()
    return [out.detach().float(), *[p.grad for p in model.parameters()]]


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("linears", FLOAT16),
        pytest.param("attention", FLOAT16, marks=pytest.mark.slow),
        pytest.param("linears", BFLOAT16, marks=pytest.mark.slow),
        pytest.param("attention", BFLOAT16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_no_units")
def test_rounding_points_are_those_of_low_products(name: str, dtype: torch.dtype) -> None:
    """Compares with eager code; in float16 gradients are subnormal, so that each rounding shows."""
    build, shape = PROGRAMS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    twin, exact = copy.deepcopy(model), copy.deepcopy(model)
    options: dict[str, Any] = {"fallback": False}
    compiled = torch.compile(model, backend="amp_fx", options=options)
    actual = results(compiled, model, x, dtype)
    with WidelyByHand():  # type: ignore[no-untyped-call]
        expected = results(twin, twin, x, dtype)
    (exact(x) ** 2).mean().mul(1e-2).backward()
    unrounded: list[Any] = [p.grad for p in exact.parameters()]
    for ours, theirs in zip(actual, expected, strict=True):
        assert distance(ours, theirs) < 2e-4
    assert any(distance(g, e) > 5e-4 for g, e in zip(expected[1:], unrounded, strict=True))


@pytest.fixture
def targets() -> Iterator[list[tuple[Any, torch.dtype]]]:
    """The products of all graphs that inductor got, with the dtype that they are summed from."""
    found: list[tuple[Any, torch.dtype]] = []

    def note(graph: fx.Graph) -> None:
        products = [node for node in graph.nodes if node.target in KINDS]
        found.extend((n.target, n.all_input_nodes[0].meta["val"].dtype) for n in products)

    with torch._inductor.config.patch(post_grad_custom_pre_pass=note, fx_graph_cache=False):
        yield found


def train(**options: Any) -> None:
    given = {"dtype": FLOAT16, "fallback": False, **options}
    compiled = torch.compile(Linears(), backend="amp_fx", options=given)
    compiled(torch.randn(64, 32)).sum().backward()


@pytest.mark.parametrize("has_units", [True, False])
def test_forward_and_backward_follow_the_units(
    has_units: bool, targets: list[tuple[Any, torch.dtype]], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("_all_units" if has_units else "_no_units")
    train()
    assert {target for target, _ in targets} == {aten.mm.default, aten.addmm.default}
    assert {seen for _, seen in targets} == {FLOAT16 if has_units else torch.float32}
    assert len(targets) == 3 + 5, "three layers, and no gradient of the input"


@pytest.mark.usefixtures("_no_units")
def test_a_sum_of_batched_products_is_rounded_once(targets: list[tuple[Any, torch.dtype]]) -> None:
    start, left, right = torch.randn(8, 5), torch.randn(4, 8, 16), torch.randn(4, 16, 5)
    options: dict[str, Any] = {"dtype": FLOAT16, "fallback": False}
    program: Callable[..., torch.Tensor] = torch.addbmm
    result = torch.compile(program, backend="amp_fx", options=options)(start, left, right)
    low_start, low_left, low_right = (t.half().float() for t in (start, left, right))
    assert torch.equal(result, low_start.addbmm(low_left, low_right).half().float())
    assert targets == [(aten.addbmm.default, torch.float32)]


@pytest.mark.usefixtures("_no_units")
def test_eager_numerics_leave_products_low(targets: list[tuple[Any, torch.dtype]]) -> None:
    train(numerics="strict")
    assert {seen for _, seen in targets} == {FLOAT16}


@pytest.mark.usefixtures("_no_units")
def test_views_of_a_value_share_its_float32_form() -> None:
    """A gradient goes into two products, for its input and, transposed, for its weight."""
    found: list[tuple[int, int]] = []

    def note(graph: fx.Graph) -> None:
        products = [node for node in graph.nodes if node.target in KINDS]
        read = {behind(VIEWS, source) for node in products for source in node.all_input_nodes}
        found.append((len(read), len({behind(VIEWS | ROUNDINGS, node) for node in read})))

    with torch._inductor.config.patch(post_grad_custom_pre_pass=note, fx_graph_cache=False):
        train()
    assert found[-1][0] == 3 + 3 + 2, "of three layers: gradients, inputs, and two weights"
    assert all(num_forms == num_values for num_forms, num_values in found), found


VIEWS = frozenset((aten.permute.default, aten.t.default, aten.view.default))
ROUNDINGS = frozenset(
    (torch.ops.amp_fx.rounded.default, torch.ops.prims.convert_element_type.default)
)


def behind(targets: frozenset[Any], node: fx.Node) -> fx.Node:
    while node.target in targets:
        node = node.all_input_nodes[0]
    return node


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("positions", "seen"), [(64, torch.float32), (256, BFLOAT16)], ids=["few", "many"]
)
@pytest.mark.usefixtures("_all_units")
def test_backward_of_attention_goes_by_its_own_sizes(
    positions: int, seen: torch.dtype, targets: list[tuple[Any, torch.dtype]]
) -> None:
    options: dict[str, Any] = {"dtype": BFLOAT16, "fallback": False}
    compiled = torch.compile(Attention(), backend="amp_fx", options=options)
    compiled(torch.randn(2, positions, 32)).sum().backward()
    kinds = [(KINDS[target], dtype) for target, dtype in targets if "attention" in KINDS[target]]
    assert kinds == [("attention", BFLOAT16), ("attention backward", seen)]


def run_here(code: str, **environment: str) -> Any:
    """Runs Python code in another process, and returns the JSON of its last line."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


ISAS = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="oneDNN is told by the names of x86's instructions"
)


@pytest.mark.one_in(3)
@ISAS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("isa", ["DEFAULT", "AVX2"])
def test_onednn_says_itself_whether_it_has_kernels(isa: str, dtype: str) -> None:
    """Compares with what oneDNN logs about a product and a convolution."""
    lines = run_here(
        f"""
        import torch
        from amp_fx.devices.low_dtypes import has_product_kernels
        ones = torch.ones(64, 64, dtype=torch.{dtype})
        ones @ ones
        torch.conv2d(ones.view(1, 64, 8, 8), torch.ones(64, 64, 3, 3, dtype=torch.{dtype}))
        print(has_product_kernels(torch.{dtype}))
        """,
        ONEDNN_MAX_CPU_ISA=isa,
        OMP_NUM_THREADS="1",
        ONEDNN_VERBOSE="1",
    )
    calls = [line.split(",") for line in lines if ",exec,cpu," in line]
    kernels = [fields[6] for fields in calls if fields[5] in ("matmul", "convolution")]
    has_kernels = bool(kernels) and not any("ref" in kernel for kernel in kernels)
    assert lines[-1] == str(has_kernels), lines


def test_caches_tell_products_apart(request: pytest.FixtureRequest) -> None:
    config: Any = torch.compiler.config
    keys = []
    for options in ({"numerics": "strict"}, {}):
        with keyed(Options.parse(options)):
            keys.append(config.cache_key_tag)
    for units in ("_all_units", "_no_units"):
        request.getfixturevalue(units)
        with keyed(Options()):
            keys.append(config.cache_key_tag)
    assert len({*keys}) >= 3
    assert keys[2] != keys[3]


@pytest.mark.usefixtures("_no_units")
def test_explain_and_stats_say_that_bits_differ() -> None:
    explanation = amp_fx.explain(Linears(), dtype=FLOAT16)(torch.randn(8, 32))
    assert "float16 products are computed in float32" in " ".join(str(explanation).split())
    low = amp_fx.explain(Linears(), dtype=FLOAT16, options={"numerics": "strict"})
    assert "computed in float32" not in " ".join(str(low(torch.randn(8, 32))).split())
    before = stats.snapshot()["wide_products"]
    no_autograd_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(fx_graph_cache=False), no_autograd_cache:
        train()  # on a hit, passes do not run
    assert stats.snapshot()["wide_products"] == before + 8


@needs.FROZEN_GRAPHS
@pytest.mark.usefixtures("_no_units")
def test_inference_keeps_weights_wide_and_fresh() -> None:
    """Caches rounded weights in float32, so that no call widens them again."""
    torch.manual_seed(0)
    model: Any = Linears().eval()
    x = torch.randn(64, 32)
    options: dict[str, Any] = {"dtype": FLOAT16, "fallback": False}
    compiled = torch.compile(model, backend="amp_fx", options=options)
    weight_cache.clear()
    with torch.no_grad():
        for _ in range(2):
            with WidelyByHand(), torch.autocast("cpu", FLOAT16):  # type: ignore[no-untyped-call]
                expected = model(x).float()
            assert distance(compiled(x), expected) < 1e-3  # type: ignore[no-untyped-call]
            model.layers[0].weight.data.mul_(2)
    kept = [value for value in weight_cache.stats().values if value.weights[0].endswith("weight")]
    assert {value.weights for value in kept} == {(f"layers.{i}.weight",) for i in range(3)}
    assert all(value.bytes >= 32 * 32 * 4 for value in kept)
