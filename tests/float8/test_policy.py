"""The treatment ``"float8"``: presets, ops, modules, arguments, files; what stays low."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import Policy
from amp_fx.errors import PolicyError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:float8 products on the CPU:amp_fx.errors.DtypeWarning")
]

PRESET = "float8-rowwise"
EXPLICIT = Policy.default().with_ops({"linear": "float8"})


def three(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 16))


def reasons(model: nn.Module, policy: Any, *inputs: torch.Tensor) -> list[str]:
    """Returns the reason that ``explain`` gives for each product."""
    found = amp_fx.explain(model, policy=policy)(*inputs)
    products = ("linear", "mm", "matmul", "addmm")
    ops = ("amp_fx.float8_product", *(f"aten.{name}" for name in products))
    return [n.reason for graph in found.graphs for n in graph.nodes if n.op in ops]


def test_first_and_last_product_of_a_preset_stay_low() -> None:
    first, middle, last = reasons(three(), PRESET, torch.randn(16, 16))
    assert "it is the first product of the model" in first
    assert "float8, recipe rowwise" in middle
    assert "e4m3 with a scale per row" in middle
    assert "it is the last product of the model" in last


def test_what_a_user_names_is_quantized_also_at_the_ends() -> None:
    assert all("float8, recipe" in r for r in reasons(three(), EXPLICIT, torch.randn(16, 16)))


@pytest.mark.parametrize(
    "policy",
    [
        Policy.default().with_modules({"1": "float8"}),
        Policy.default().with_modules({"1": {"linear": "float8"}}),
        Policy.default()
        .with_args("linear", {"input": "float8", "weight": "float8"})
        .with_modules({"0": "lower_precision_fp", "2": "lower_precision_fp"}),
    ],
    ids=["module", "op of a module", "arguments"],
)
def test_ways_to_name_one_product(policy: Policy) -> None:
    found = reasons(three(), policy, torch.randn(16, 16))
    assert ["float8, recipe tensorwise" in reason for reason in found] == [False, True, False]


def test_a_module_in_float8_leaves_what_is_no_product_to_the_table() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Softmax(-1))
    policy = Policy.default().with_modules({"*": "float8"})
    plain = amp_fx.explain(model)(torch.randn(16, 16))
    float8 = amp_fx.explain(model, policy=policy)(torch.randn(16, 16))
    others = [
        [(n.op, n.dtype) for n in each.graphs[0].nodes if "norm" in n.op or "softmax" in n.op]
        for each in (plain, float8)
    ]
    assert others[0] == others[1] != []


def test_files_hold_recipe_and_sizes() -> None:
    policy = Policy.default().with_modules({"1": "float8"}).with_float8("rowwise", least_in=64)
    assert Policy.from_dict(policy.to_dict()) == policy
    assert 'recipe = "rowwise"' in str(policy)
    rounded = policy.with_float8(source="bfloat16")
    assert rounded != policy
    assert Policy.from_dict(rounded.to_dict()) == rounded
    preset = Policy.from_dict({"base": PRESET})
    assert Policy.from_dict(preset.to_dict()) == preset
    assert preset.float8.recipe == "rowwise"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Policy.default().with_ops({"softmax": "float8"}), "does not support this policy"),
        (lambda: Policy.default().with_float8("rowise"), "did you mean 'rowwise'"),
        (lambda: Policy.default().with_float8(least_in=0), "to be a positive integer"),
        (lambda: Policy.default().with_float8(source="bfloat8"), "did you mean 'bfloat16'"),
        (lambda: Policy.default().with_args("linear", {"input": "float8"}), "input and weight"),
        (lambda: Policy.from_dict({"float8": {"recip": "rowwise"}}), "key 'float8'"),
        *(
            (lambda op=op: Policy.default().with_ops({op: "float8"}), "products are aten::linear,")
            for op in ("bmm", "baddbmm", "_grouped_mm")
        ),
    ],
)
def test_wrong_policies(change: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        change()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.middle(self.embedding(x)))


@pytest.mark.parametrize(
    ("model", "x", "policy", "message"),
    [
        (three(24), torch.randn(16, 16), PRESET, "its 24 outputs are not a multiple of 16"),
        (three(), torch.randn(0, 16), PRESET, "the batch is empty"),
        (
            three(),
            torch.randn(16, 16),
            EXPLICIT.with_float8(least_in=64),
            "its 16 inputs are fewer than 64",
        ),
        (
            three(),
            torch.randn(16, 16),
            EXPLICIT.with_dtype(torch.float16),
            "the region's dtype is float16",
        ),
        (three().half(), torch.randn(16, 16).half(), EXPLICIT, "the weight is stored in float16"),
    ],
    ids=["size", "empty", "least size", "float16", "weight in float16"],
)
def test_what_does_not_fit_stays_low(
    model: nn.Module, x: torch.Tensor, policy: Any, message: str
) -> None:
    assert any(message in reason for reason in reasons(model, policy, x))
    options: dict[str, Any] = {"policy": policy, "fallback": False, "compiler": "aot_eager"}
    found = torch.compile(model, backend="amp_fx", options=options)(x)
    assert found.shape == model(x).shape


def test_a_weight_stored_in_float8_is_named() -> None:
    model = three()
    layer = model.get_submodule("1")
    weight = layer.get_parameter("weight").detach().to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    (reason,) = [r for r in reasons(model, PRESET, torch.randn(16, 16)) if "stored" in r]
    assert "not in float8: the weight is stored in float8_e4m3fn" in reason
    options: dict[str, Any] = {"policy": PRESET, "compiler": "aot_eager", "fallback": False}
    x = torch.randn(16, 16)
    y = torch.compile(model, backend="amp_fx", options=options)(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


def test_tied_embeddings_train() -> None:
    """The head's weight is the embedding's, and both gradients reach it."""
    torch.manual_seed(0)
    model, tokens = _Tied(), torch.randint(32, (4, 8))
    found = {}
    for policy in ("torch", EXPLICIT):
        torch._dynamo.reset()
        options: dict[str, Any] = {"policy": policy, "compiler": "aot_eager", "fallback": False}
        torch.compile(model, backend="amp_fx", options=options)(tokens).square().mean().backward()
        assert model.embedding.weight.grad is not None
        found[str(policy)] = model.embedding.weight.grad.clone()
        model.zero_grad()
    low, float8 = found.values()
    assert 0 < (low - float8).norm() < 0.1 * low.norm()


@pytest.mark.slow
def test_dynamic_batches() -> None:
    """Batches of all sizes give what a static graph gives, also those that 16 does not divide."""
    model = three()
    options: dict[str, Any] = {"policy": EXPLICIT, "compiler": "aot_eager", "fallback": False}
    dynamic = torch.compile(model, backend="amp_fx", options=options, dynamic=True)
    for size in (16, 7, 33, 0):
        x = torch.randn(size, 16)
        static = torch.compile(model, backend="amp_fx", options=options, dynamic=False)
        y = dynamic(x)
        y.sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        expected = static(x)
        expected.sum().backward()
        assert torch.equal(y, expected)
        for ours, p in zip(grads, model.parameters(), strict=True):
            assert p.grad is not None
            assert torch.equal(ours, p.grad)
        model.zero_grad()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_batch_of_one(recipe: str) -> None:
    """One row turned is a column, which inductor lays out as it likes."""
    model, x = three(), torch.randn(1, 16)
    policy = EXPLICIT.with_float8(recipe)
    options: dict[str, Any] = {"policy": policy, "numerics": "strict", "fallback": False}
    y = torch.compile(model, backend="amp_fx", options=options)(x)
    torch.compiler.reset()
    options = {"policy": policy, "compiler": "eager", "weight_cache": False}
    expected = torch.compile(model, backend="amp_fx", options=options)(x)
    weights = list(model.parameters())
    pairs = [torch.autograd.grad(each.float().square().sum(), weights) for each in (y, expected)]
    assert torch.equal(y, expected.float())
    assert all(map(torch.equal, *pairs))


def test_products_with_transposed_and_plain_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(16, 32))
            self.b = nn.Parameter(torch.randn(32, 16))

        def forward(self, x: torch.Tensor) -> Any:
            y = torch.addmm(x.new_ones(32), x, self.a)
            return torch.matmul(torch.mm(y, self.b), self.b.t()) @ x.new_ones(32, 16)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, 16)
    policy = Policy.default().with_ops(dict.fromkeys(("addmm", "mm", "matmul"), "float8"))
    found = reasons(model, policy, x)
    assert ["float8, recipe" in reason for reason in found] == [True, True, True, False]
    assert "neither side is a weight" in found[-1]
    outputs = []
    for chosen in ("torch", policy):
        torch._dynamo.reset()
        options: dict[str, Any] = {"policy": chosen, "compiler": "aot_eager", "fallback": False}
        y = torch.compile(model, backend="amp_fx", options=options)(x)
        y.sum().backward()
        outputs.append((y, model.a.grad, model.b.grad))
        model.a.grad = model.b.grad = None
    for low, float8 in zip(*outputs, strict=True):
        assert (low - float8).norm() < 0.1 * low.norm()


class _Batches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.matmul(x, self.weight)


def test_a_batch_of_weights_stays_low() -> None:
    torch.manual_seed(0)
    model, x = _Batches(), torch.randn(4, 2, 16)
    [reason] = reasons(model, PRESET, x)
    assert "not in float8: the weight has 3 dimensions" in reason
    outputs = []
    for policy in ("torch", PRESET):
        torch._dynamo.reset()
        options: dict[str, Any] = {"policy": policy, "compiler": "aot_eager", "fallback": False}
        outputs.append(torch.compile(model, backend="amp_fx", options=options)(x))
    assert torch.equal(*outputs)


def test_export_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="float8, which is not supported in exported programs"
    ):
        amp_fx.export(three(), (torch.randn(16, 16),), policy=PRESET)


def test_the_cpu_is_warned_of_once() -> None:
    from amp_fx.devices.float8 import warn_of_slowness

    warn_of_slowness.cache_clear()
    options: dict[str, Any] = {"policy": PRESET, "compiler": "aot_eager"}
    with pytest.warns(amp_fx.errors.DtypeWarning, match="float8 products on the CPU"):
        torch.compile(three(), backend="amp_fx", options=options)(torch.randn(16, 16))


def test_a_device_without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    from amp_fx.devices import float8

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(float8, "device_names", lambda *_: "NVIDIA A100 (compute capability 8.0)")
    float8._why_not_on_cuda.cache_clear()
    reason = float8.why_no_float8(torch.device("cuda", 0))
    float8._why_not_on_cuda.cache_clear()
    gpu = "NVIDIA A100 (compute capability 8.0)"
    assert reason == f"{gpu} has no float8 support, which requires 8.9 or higher"
    for name in ("xpu", "mps"):
        assert name in float8.why_no_float8(torch.device(name))


def test_no_cast_is_called_a_round_trip() -> None:
    found = amp_fx.explain(three(), policy=PRESET)(torch.randn(16, 16))
    said = {cast.removed_by for graph in found.graphs for cast in graph.casts if cast.removed_by}
    assert said == {"the weight is quantized to float8 instead"}


def test_a_module_without_a_product_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    options: dict[str, Any] = {"policy": Policy.default().with_modules({"1": "float8"})}
    compiled = torch.compile(model, backend="amp_fx", options=options | {"compiler": "aot_eager"})
    with pytest.warns(amp_fx.errors.PolicyWarning, match="no product runs in float8"):
        compiled(torch.randn(16, 16))
