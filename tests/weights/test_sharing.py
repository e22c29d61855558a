"""Weights that are used in several ways: tied, frozen, in two dtypes, as buffers, replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from amp_fx import weight_cache
from tests.weights.nets import (
    EVAL,
    HALF,
    SIZE,
    TRAIN,
    Net,
    Weight,
    assert_same,
    autocast,
    compile_amp_fx,
    gradients,
    inputs,
    make_net,
    random,
    square,
    twin_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Tied(nn.Module):
    """An embedding that is the output projection as well: read in float32 and in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, SIZE)
        self.embedding.weight.data.copy_(random(8, SIZE))
        self.head = nn.Linear(SIZE, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_tied_weights(compiler: str) -> None:
    model, twin = Tied(), Tied()
    compiled = compile_amp_fx(model, compiler=compiler)
    tokens = torch.arange(6).view(2, 3)
    for _ in range(3):
        out, expected = compiled(tokens), autocast(twin, tokens)
        assert_same(out, expected)
        assert_same(gradients(out, model), gradients(expected, twin))
        with torch.no_grad():
            assert_same(compiled(tokens), autocast(twin, tokens))
        for m in (model, twin):
            m.embedding.weight.data.mul_(1.5)


def test_one_copy_of_each_dtype_for_all_graphs_of_a_model() -> None:
    net = make_net()
    first, second = compile_amp_fx(net), compile_amp_fx(net)
    first(inputs())
    with torch.no_grad():
        first(inputs())
        second(inputs())
    assert weight_cache.stats().entries == 3
    HALF.compile(net)(inputs())
    assert weight_cache.stats().entries == 6


def partly_frozen(_: Path) -> nn.Module:
    net = make_net()
    net.a.requires_grad_(requires_grad=False)
    return net


def of_a_mapped_file(folder: Path) -> nn.Module:
    torch.save(make_net(3).state_dict(), folder / "net")
    net = make_net()
    net.load_state_dict(torch.load(folder / "net", mmap=True), assign=True)
    return net


def parametrized(name: str) -> Callable[[Path], nn.Module]:
    def make(_: Path) -> nn.Module:
        torch.manual_seed(0)
        net = make_net()
        getattr(parametrizations, name)(net.a)
        return net.eval()

    return make


MODELS: dict[str, Callable[[Path], nn.Module]] = {
    "partly frozen": partly_frozen,
    "no element": lambda _: Weight(torch.ones(0, SIZE)),
    "one row": lambda _: Weight(torch.ones(1, SIZE)),
    "mapped file": of_a_mapped_file,
    "weight_norm": parametrized("weight_norm"),
    "orthogonal": parametrized("orthogonal"),
    "spectral_norm": parametrized("spectral_norm"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_any_kind_and_origin(kind: str, tmp_path: Path) -> None:
    net = MODELS[kind](tmp_path)
    twin = twin_of(net)
    compiled = TRAIN.compile(net)
    is_trained = any(parameter.requires_grad for parameter in net.parameters())
    for _ in range(3):
        for graph in (TRAIN, EVAL) if is_trained else (EVAL,):
            graph.check(compiled, net, twin)
        for model in (net, twin):
            for parameter in model.parameters():
                parameter.data.mul_(1.25)


class TwoDtypes(nn.Module):
    """One weight in a bfloat16 region and in a float16 one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight)
        with torch.autocast("cpu", torch.float16):
            z = functional.linear(x, self.weight)
        with torch.autocast("cpu", enabled=False):
            w = functional.linear(x, self.weight)
        return y.float() + z.float() + w


def test_two_dtypes_in_one_graph() -> None:
    """Eager's own cache would hand the bfloat16 cast to the float16 region: off for once."""
    model, twin = TwoDtypes(), TwoDtypes()
    compiled, plain = compile_amp_fx(model), compile_amp_fx(model, weight_cache=False)
    weight_cache.clear()
    for _ in range(3):
        out, expected = compiled(inputs()), plain(inputs())
        with torch.no_grad():
            with torch.autocast("cpu", cache_enabled=False):
                eager = twin(inputs())
            assert_same([out, compiled(inputs())], [eager, eager])
        assert_same(gradients(out, model), gradients(expected, model))
        for m in (model, twin):
            m.weight.data.mul_(1.5)
    assert weight_cache.stats().entries == 2


def test_dynamic_shapes() -> None:
    net, twin = make_net(), make_net()
    compiled = torch.compile(net, backend="amp_fx", options={"compiler": "eager"}, dynamic=True)
    for rows in (2, 3, 5):
        x = random(rows, SIZE)
        assert_same(compiled(x), autocast(twin, x))
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)


class WithBuffer(nn.Module):
    """A buffer that is multiplied by, and one that the graph writes."""

    projection: torch.Tensor
    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", random(SIZE, SIZE))
        self.register_buffer("running", random(SIZE, SIZE, seed=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.projection)
        z = functional.linear(y, self.running)
        self.running.mul_(0.5)
        return z + functional.linear(y, self.running)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@torch.no_grad()
def test_buffers(compiler: str) -> None:
    model, twin = WithBuffer(), WithBuffer()
    compiled = compile_amp_fx(model, compiler=compiler)
    for i in range(4):
        assert_same(compiled(inputs()), autocast(twin, inputs()))
        assert_same(model.running, twin.running)
        for m in (model, twin):
            if i == 1:
                m.projection.copy_(random(SIZE, SIZE, seed=5))
            if i == 2:
                m.projection = random(SIZE, SIZE, seed=6)


class Writes(nn.Module):
    """The graph writes its weight, and reads it afterwards, before too if told so."""

    def __init__(self, *, reads_before: bool) -> None:
        super().__init__()
        flat = random(SIZE * SIZE)
        self.register_buffer("flat", flat)
        self.weight = nn.Parameter(flat.view(SIZE, SIZE))
        self.reads_before = reads_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = functional.linear(x, self.weight) if self.reads_before else 0
        self.write()
        return before + functional.linear(x, self.weight) + self.weight.sum()

    def write(self) -> None:
        raise NotImplementedError


class WritesBuffer(Writes):
    def write(self) -> None:
        self.flat.mul_(2)  # type: ignore[operator]


class WritesData(Writes):
    def write(self) -> None:
        self.weight.data.mul_(2)


class WritesDetached(Writes):
    def write(self) -> None:
        self.weight.detach().mul_(2)


class WritesView(Writes):
    def write(self) -> None:
        self.weight[1:].mul_(2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [WritesBuffer, WritesData, WritesDetached, WritesView])
@pytest.mark.parametrize("reads_before", [False, True])
@pytest.mark.parametrize("has_cache", [True, False])
@torch.no_grad()
def test_weights_that_the_graph_writes(
    kind: type[Writes], reads_before: bool, has_cache: bool
) -> None:
    model, twin = kind(reads_before=reads_before), kind(reads_before=reads_before)
    compiled = compile_amp_fx(model, weight_cache=has_cache)
    reader = compile_amp_fx(weight_of(model), weight_cache=has_cache)
    for _ in range(3):
        assert_same(reader(inputs()), autocast(weight_of(twin), inputs()))
        # Eager's own cache would hold the weight as it was: fresh casts are right.
        with torch.autocast("cpu", cache_enabled=False):
            expected = twin(inputs()).float()
        assert_same(compiled(inputs()), expected)


def weight_of(model: Any) -> Callable[..., torch.Tensor]:
    return lambda x: functional.linear(x, model.weight)


class StoredLow(nn.Module):
    """Weights stored in bfloat16 that an op reads in float32, including a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
        self.strided = nn.Parameter(random(SIZE, 6).bfloat16()[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.prod(self.scale) * torch.prod(self.strided)


@pytest.mark.parametrize("verify", [False, True])
def test_copies_in_float32(verify: bool) -> None:
    model, twin = StoredLow(), StoredLow()
    compiled = TRAIN.compile(model, verify=verify)
    for _ in range(2):
        x = inputs()
        out, expected = compiled(x), autocast(twin, x)
        for parameter in model.parameters():
            parameter.data_ptr()
        compiled(x)
        assert_same(out, expected)
        assert_same(gradients(out, model), gradients(expected, twin))


# Weights of unusual origin.


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, twin = Weight(square().detach()), Weight(square().detach())
        compiled = compile_amp_fx(model)
        for _ in range(3):
            assert_same(compiled(inputs()), autocast(twin, inputs()))
            for m in (model, twin):
                m.weight.mul_(1.5)


def test_calls_in_inference_mode_and_outside_by_turns() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    for i in range(6):
        with torch.inference_mode(i % 2 == 0):
            assert_same(compiled(inputs()).clone(), autocast(twin, inputs()))
        if i % 3 == 0:
            for model in (net, twin):
                model.a.weight.data.mul_(1.5)
    TRAIN.check(compiled, net, twin)


def test_functional_call_with_other_parameters() -> None:
    net, twin = make_net(), make_net()
    sets = [{k: nn.Parameter(p * s) for k, p in net.named_parameters()} for s in (1.5, 2.0, 3.0)]

    def call(model: Net, parameters: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
        return out

    compiled = compile_amp_fx(call)
    for i in range(6):
        parameters = sets[i % 3]
        out, expected = (
            compiled(net, parameters, inputs()),
            autocast(call, twin, parameters, inputs()),
        )
        assert_same(out, expected)
        wanted = list(parameters.values())
        assert_same(
            torch.autograd.grad(out.sum(), wanted), torch.autograd.grad(expected.sum(), wanted)
        )
        wanted[0].data.mul_(1.5)


def test_pruned_weights() -> None:
    net, twin = make_net(), make_net()
    compiled = TRAIN.compile(net)
    TRAIN.check(compiled, net, twin)
    for model in (net, twin):
        prune.l1_unstructured(model.a, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    TRAIN.check(compiled, net, twin)
    EVAL.check(compiled, net, twin)
    for model in (net, twin):
        model.a.weight_orig.data.mul_(1.5)  # type: ignore[operator]
    TRAIN.check(compiled, net, twin)
    for model in (net, twin):
        prune.remove(model.a, "weight")  # type: ignore[no-untyped-call]
        model.a.weight.data.mul_(1.5)
    TRAIN.check(compiled, net, twin)


def test_weights_tied_between_calls() -> None:
    net, twin = make_net(), make_net()
    compiled = EVAL.compile(net)
    EVAL.check(compiled, net, twin)
    for model in (net, twin):
        model.b.weight = model.a.weight
        model.a.weight.data.mul_(1.5)
    EVAL.check(compiled, net, twin)


@pytest.mark.parametrize("is_flat", [False, True])
@torch.no_grad()
def test_layers_that_are_compiled_one_by_one_share_code_and_no_copies(is_flat: bool) -> None:
    """One graph serves all layers, by turns; they may lie in one buffer, as in sharded training."""
    layers, twins = [[nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)] for _ in range(2)]
    for models in (layers, twins):
        flat = random(3, SIZE, SIZE)
        for layer, weight in zip(models, flat if is_flat else flat.clone().unbind(), strict=True):
            layer.weight.data = weight if is_flat else weight.clone()
    compiled = [compile_amp_fx(layer) for layer in layers]
    for i in range(9):
        k = i * i % 3
        for j in (k, (k + 1) % 3, k):
            assert_same(compiled[j](inputs()), autocast(twins[j], inputs()))
        for models in (layers, twins):
            models[i % 3].weight.data.mul_(1.5)


def test_without_the_cache() -> None:
    net, twin = make_net(), make_net()
    compiled = TRAIN.compile(net, weight_cache=False)
    TRAIN.check(compiled, net, twin)
    assert weight_cache.stats().entries == 0


def test_a_region_that_disables_eager_caching_disables_ours() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        out, expected = compiled(inputs()), twin(inputs())
    assert_same(out, expected)
    assert_same(gradients(out, net), gradients(expected, twin))
    assert weight_cache.stats().entries == 0


def test_under_an_ambient_region() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(compiled(inputs()), twin(inputs()))
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)
