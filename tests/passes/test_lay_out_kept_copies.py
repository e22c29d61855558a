"""Kept copies of convolution weights lie as the compiled convolutions take them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from amp_fx import weight_cache
from amp_fx.backend import entry as backend
from amp_fx.backend.inner import has_cpp_compiler
from amp_fx.passes import lay_out_kept_copies as layouts
from amp_fx.passes.lay_out_kept_copies import prefers_channels_last
from amp_fx.weights.kept_cast import Slot, laid_out_as_before
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.nets import assert_same, compile_amp_fx, random

if TYPE_CHECKING:
    from collections.abc import Callable

CHANNELS = 8

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")


class Block(nn.Module):
    """Convolutions, and a view that only a contiguous tensor allows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.b = nn.Conv2d(CHANNELS, CHANNELS, 3, padding="same")
        self.up = nn.ConvTranspose2d(CHANNELS, CHANNELS, 3)
        self.last = nn.Linear(36, 4)
        for i, parameter in enumerate(self.parameters()):
            parameter.data.copy_(random(*parameter.shape, seed=i) / 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + self.b(torch.relu(self.norm(self.a(x))))
        y = self.up(y)
        return y, self.last(y.view(len(y), CHANNELS, -1))


def images(seed: int = 50) -> torch.Tensor:
    return random(2, CHANNELS, 4, 4, seed=seed)


@pytest.fixture
def lays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lays copies out for AOTAutograd alone too, which is quick and strict about strides."""
    monkeypatch.setattr(backend, "uses_inductor", lambda *_: True)
    monkeypatch.setattr(backend, "weights_to_freeze", lambda *_: {})  # they have their own layouts


@pytest.fixture(
    params=["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])]
)
def compiler(request: pytest.FixtureRequest) -> str:
    """Inductor, or AOTAutograd with copies laid out."""
    if request.param == "aot_eager":
        request.getfixturevalue("lays_out")
    return str(request.param)


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def laid_out_names() -> set[str]:
    """The weights whose copies are kept in another layout than their own."""
    copies = [e for e in kept_copies() if e.wanted.memory_format is torch.channels_last]
    assert all(is_channels_last(copy.value) for copy in copies)
    return names_of(copies)


def kept_copies() -> list[Any]:
    """The low-precision copies of the store."""
    entries = STORE.entries.values()
    return [e for e in entries if isinstance(e.wanted, Slot) and not e.wanted.is_alias]


def names_of(copies: list[Any]) -> set[str]:
    """The weights that they are copies of."""
    return {copy.wanted.name for copy in copies}


# ------------------------------------------------------------------------------- the decision


def calls(function: Callable[..., Any], *shapes: tuple[int, ...]) -> set[str]:
    """Calls a function of images and weights once; the weights whose copies were laid out."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, shape in enumerate(shapes):
                self.register_parameter(f"w{i}", nn.Parameter(random(*shape)))

        def forward(self, x: torch.Tensor) -> Any:
            return function(x, *self.parameters())

    weight_cache.clear()
    model = Weights()
    with torch.no_grad():
        compile_amp_fx(model, compiler="aot_eager", fallback=False)(images())
    assert names_of(kept_copies()) == {name for name, _ in model.named_parameters()}
    return laid_out_names()


KERNEL = (CHANNELS, CHANNELS, 3, 3)


@pytest.mark.usefixtures("lays_out")
def test_a_weight_that_only_convolutions_take_is_laid_out() -> None:
    conv = functional.conv2d
    assert calls(conv, KERNEL) == {"w0"}
    assert calls(lambda x, w: conv(x, w, groups=2), (CHANNELS, CHANNELS // 2, 3, 3)) == {"w0"}
    assert calls(functional.conv_transpose2d, KERNEL) == {"w0"}
    assert calls(lambda x, w: (conv(x, w), conv(x, w, padding=1)), KERNEL) == {"w0"}
    assert calls(lambda x, w: conv(x, w, padding="same"), KERNEL) == {"w0"}
    assert calls(conv, KERNEL, (CHANNELS,)) == {"w0"}


@pytest.mark.usefixtures("lays_out")
def test_other_weights_lie_as_they_did() -> None:
    conv = functional.conv2d
    assert calls(functional.linear, (4, 4)) == set()
    assert calls(conv, (CHANNELS, CHANNELS, 1, 1)) == set()
    assert calls(lambda x, w: functional.conv1d(x[0], w), (4, 4, 1)) == set()
    assert calls(lambda x, w: conv(w, w) + x[0, 0, 0, 0], (3, 3, 3, 3)) == set()
    assert calls(lambda x, w: (conv(x, w), functional.linear(w, x[0, 0, :3, :3])), KERNEL) == set()
    assert calls(lambda x, w: (conv(x, w), torch.conv2d(w, x[:, :, :1, :1])), KERNEL) == set()


@pytest.mark.usefixtures("lays_out")
def test_a_weight_that_is_channels_last_is_left_alone() -> None:
    weight_cache.clear()
    net = nn.Conv2d(CHANNELS, CHANNELS, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        compile_amp_fx(net, compiler="aot_eager")(images())
    assert laid_out_names() == set()
    assert any(is_channels_last(copy.value) for copy in kept_copies())


@pytest.mark.usefixtures("lays_out")
def test_settings_of_inductor_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "inductor_config", lambda _: {"layout_optimization": False})
    assert calls(functional.conv2d, KERNEL) == set()


@pytest.mark.parametrize("other", ["eager", "aot_eager"])
def test_only_inductor_gets_another_layout(other: str) -> None:
    weight_cache.clear()
    net = Block()
    with torch.no_grad():
        compile_amp_fx(net, compiler=other)(images())
    assert {"a.weight", "b.weight"} <= names_of(kept_copies())
    assert laid_out_names() == set()


def on_cuda(channels: int, out_channels: int, groups: int = 1) -> tuple[Any, ...]:
    """The arguments of a convolution on tensors that only look like CUDA's."""
    with FakeTensorMode():
        x = torch.empty(8, channels, 28, 28, device="cuda")
        weight = torch.empty(out_channels, channels // groups, 3, 3, device="cuda")
    return x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups


def prefers(*found: tuple[Any, ...], num_nodes: int = 10, is_inference: bool = False) -> bool:
    return prefers_channels_last(found, num_nodes=num_nodes, is_inference=is_inference, config={})


def test_inductor_says_of_cuda_what_it_is_known_to_say() -> None:
    """Relies on the rules of ``decide_layout_opt``."""
    plain, grouped, small = on_cuda(128, 128), on_cuda(128, 128, groups=4), on_cuda(32, 32)
    assert prefers(plain)
    assert prefers(plain, small)
    assert not prefers(small)
    assert prefers(small, is_inference=True)
    assert not prefers(plain, grouped)
    assert prefers(plain, plain, grouped, is_inference=True)
    assert not prefers(grouped, is_inference=True)
    assert not prefers(plain, num_nodes=1000)
    assert not prefers()


def test_where_inductor_cannot_be_asked_the_answer_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.graph import GraphLowering

    monkeypatch.delattr(GraphLowering, "decide_layout_opt")
    assert not prefers(on_cuda(128, 128))


# ----------------------------------------------------------------------------------- the calls


def trained(net: Block, compiler: str, *, weight_cache: bool) -> list[Any]:
    """What two calls per update give, forward and backward, and then one without gradients."""
    compiled = compile_amp_fx(net, compiler=compiler, weight_cache=weight_cache, fallback=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(6):
        outputs: Any = compiled(images(step // 2))
        found += [out.detach().clone(memory_format=torch.preserve_format) for out in outputs]
        sum(out.square().mean() for out in outputs).backward()
        if step % 2:
            found += [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found += compiled(images())
    return found


def test_bits_and_strides_are_those_without_kept_copies(compiler: str) -> None:
    weight_cache.clear()
    net = Block()
    kept = trained(net, compiler, weight_cache=True)
    assert laid_out_names() == {"a.weight", "b.weight", "up.weight"}
    torch._dynamo.reset()
    plain = trained(Block(), compiler, weight_cache=False)
    assert_same(kept, plain)
    assert [t.stride() for t in kept] == [t.stride() for t in plain]


def test_writes_are_seen_and_calls_counted(compiler: str) -> None:
    weight_cache.clear()
    net, twin = Block().eval(), Block().eval()
    compiled = compile_amp_fx(net, compiler=compiler, fallback=False, freezing=False)
    plain = compile_amp_fx(twin, compiler=compiler, fallback=False, weight_cache=False)
    with torch.no_grad():
        for _ in range(3):
            assert_same(compiled(images()), plain(images()))
        for model in (net, twin):
            model.b.weight.mul_(2)
        for _ in range(2):
            assert_same(compiled(images()), plain(images()))
    stats = weight_cache.stats()
    num_weights = 7
    assert (stats.entries, stats.refreshes) == (num_weights, num_weights + 1)
    assert stats.hits == 3 * num_weights + num_weights - 1


def test_a_backward_has_the_copy_of_its_forward(compiler: str) -> None:
    net = Block()
    compiled = compile_amp_fx(net, compiler=compiler, fallback=False)
    compiled(images())
    _, first = compiled(images())
    expected = torch.autograd.grad(first.sum(), net.a.weight, retain_graph=True)
    with torch.no_grad():
        net.b.weight.mul_(3)
    with torch.no_grad():
        compiled(images())
    assert_same(torch.autograd.grad(first.sum(), net.a.weight), expected)


@pytest.mark.usefixtures("lays_out")
def test_graphs_of_both_layouts_share_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_cache.clear()
    net = nn.Conv2d(CHANNELS, CHANNELS, 3, bias=False)
    with torch.no_grad():
        first = compile_amp_fx(net, compiler="aot_eager")
        outputs = [first(images())]
        monkeypatch.setattr(backend, "uses_inductor", lambda *_: False)
        second = compile_amp_fx(lambda x: net(x) * 1, compiler="aot_eager")
        outputs += [second(images()), first(images())]
    assert weight_cache.stats().entries == 2
    assert_same(outputs[0], outputs[2])
    assert_same(outputs[1], outputs[2])


@pytest.mark.usefixtures("lays_out")
@needs.WATCH
@pytest.mark.filterwarnings("ignore")
def test_a_sample_compares_the_element_that_the_weight_has() -> None:
    """Each element is another number: were it looked for elsewhere, calls would be alarmed."""
    weight_cache.clear()
    net = nn.Conv2d(CHANNELS, CHANNELS, 3, bias=False)
    weight = net.weight.detach()
    weight.copy_(torch.arange(weight.numel()).reshape(weight.shape))
    compiled = compile_amp_fx(net, compiler="aot_eager")
    with torch.no_grad():
        for _ in range(200):
            compiled(images())
        assert weight_cache.stats().refreshes == 1
        array = weight.numpy()
        compiled(images())
        array[:] = 3 - array
        compiled(images())
        assert_same(compiled(images()), twin_output(net))


def twin_output(net: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(images()).float()  # type: ignore[no-any-return]


def test_the_op_gives_what_its_weight_would_have() -> None:
    low = images().to(memory_format=torch.channels_last)
    laid_out = laid_out_as_before(low)
    assert_same(laid_out, low)
    assert laid_out.is_contiguous()


# ------------------------------------------------------------------------- the generated code


CONVOLUTION = re.compile(r"extern_kernels\.convolution\(\w+, (\w+),")


@needs_compiler
@pytest.mark.parametrize("is_trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_call_lays_a_kept_copy_out_again(is_trained: bool) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).train(is_trained)
    options = {"freezing": False, "products": "low"}  # products in float32 lay copies out anew
    compiled = compile_amp_fx(net, compiler="inductor", fallback=False, **options)

    def call_twice() -> None:
        with torch.set_grad_enabled(is_trained):
            for _ in range(2):  # with gradients the second call takes the copies
                compiled(random(2, 8, 12, 12))

    _, codes = run_and_get_code(call_twice)
    weights = CONVOLUTION.findall(codes[-1])
    assert len(weights) == 2
    assert all(re.fullmatch(r"(arg|primals_)\d+(_\d+)?", weight) for weight in weights)


@needs_compiler
@pytest.mark.slow
def test_inductor_decides_as_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.graph import GraphLowering

    decided, foretold = [], []
    decide, foretell = GraphLowering.decide_layout_opt, layouts.prefers_channels_last

    def record(*args: Any, **kwargs: Any) -> bool:
        decided.append(decide(*args, **kwargs))
        return decided[-1]

    def record_foretold(*args: Any, **kwargs: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GraphLowering, "decide_layout_opt", staticmethod(decide))
            foretold.append(foretell(*args, **kwargs))
        return foretold[-1]

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(record))
    monkeypatch.setattr(layouts, "prefers_channels_last", record_foretold)
    with torch.no_grad():
        compile_amp_fx(Block(), compiler="inductor", fallback=False, freezing=False)(images())
    assert decided == foretold == [True]
