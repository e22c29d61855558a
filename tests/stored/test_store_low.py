"""Weights stored low in place: the bits stay, the bytes go."""

from __future__ import annotations

import copy
import io
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import amp_fx
from amp_fx import CastPolicy, weight_cache
from amp_fx.errors import ArgumentTypeError, OptionError, UnsupportedError
from tests.models.explained import CASES, mlp
from tests.parity import oracle
from tests.parity.cases import CASES as PARITY
from tests.parity.models import recurrent, shapes, transformers, weights  # noqa: F401, each registers its cases
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Build = Callable[[], tuple[nn.Module, Sequence[Any]]]

LOW = torch.bfloat16


def call(program: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs a program in the region, without gradients."""
    with torch.no_grad(), torch.autocast("cpu", LOW):
        return program(*args)


def wide(width: int = 256, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)]
    return nn.Sequential(*layers).eval()


class Program(nn.Module):
    """A module whose forward is a function of itself."""

    def __init__(self, program: Callable[[Any, torch.Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.program = program
        self.linear = nn.Linear(8, 8)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(self, x)


def stored_names(report: amp_fx.StorageReport) -> set[str]:
    return {weight.path for weight in report.stored}


# Bits


NAMES = ("unet", "lstm_cell", "decoder_only_with_tied_weights_and_loss", "dynamic_decoder")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_parity_models_give_the_bits_that_they_gave(name: str) -> None:
    def build() -> oracle.Subject:
        torch.manual_seed(oracle.SEED)
        subject = PARITY[name].build()
        subject.program.eval()  # type: ignore[attr-defined]
        return subject

    def run(subject: oracle.Subject) -> list[list[torch.Tensor]]:
        program = subject.program
        torch._dynamo.reset()
        bare = amp_fx.compile(program, dtype=LOW, options={"compiler": "eager"})
        ways = (program, compiled(program), bare)
        outputs = [[call(way, oracle.fresh(subject.args)) for _ in range(2)] for way in ways]
        return [oracle.tensors_of(each) for each in outputs]

    expected = run(build())
    subject = build()
    report = amp_fx.store_low(subject.program)(*oracle.fresh(subject.args))  # type: ignore[arg-type]
    assert report.stored
    torch.testing.assert_close(run(subject), expected, rtol=0, atol=0, equal_nan=True)


def test_a_policy_and_its_dtype_hold() -> None:
    args = CASES["attention"][1]
    policy = amp_fx.preset("torch").with_modules({"q": CastPolicy.FP32}).with_dtype(LOW)
    model = CASES["attention"][0]().eval()
    expected = call(compiled(model, policy=policy), args)
    report = amp_fx.store_low(model, policy=policy)(*args)
    assert {name.partition(".")[0] for name in stored_names(report)} == {"k", "v", "out"}
    found = call(compiled(model, policy=policy), args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "changed" in report.policy


def test_the_region_around_and_that_of_a_compiled_module_are_taken() -> None:
    x = torch.randn(2, 16)
    with torch.autocast("cpu", torch.float16):
        report = amp_fx.store_low(mlp().eval())(x)
    assert report.dtype == "float16"
    model = mlp().eval()
    half = amp_fx.compile(model, dtype="float16", options={"compiler": "eager"})
    expected = half(x)
    assert amp_fx.store_low(half)(x).dtype == "float16"
    assert model[0].weight.dtype == torch.float16
    torch.testing.assert_close(half(x), expected, rtol=0, atol=0)


# Bytes


def test_half_the_bytes_no_cached_casts_and_the_bits_of_inductor_for_copies_too() -> None:
    weight_cache.clear()
    model, x = wide(), torch.randn(4, 256)
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    run = compiled(model, compiler="inductor", freezing=False)
    expected = call(run, (x,))
    assert weight_cache.stats().bytes  # what was compiled before keeps copies
    report = amp_fx.store_low(model)(x)
    assert weight_cache.stats().bytes == 0
    later = compiled(model, compiler="inductor")
    copies = copy.deepcopy(model), torch.load(_saved(model), weights_only=False)
    for program in (run, later, later, *(compiled(each, compiler="inductor") for each in copies)):
        torch.testing.assert_close(call(program, (x,)), expected, rtol=0, atol=0)
    assert weight_cache.stats().bytes == 0
    now = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (report.bytes_before, report.bytes) == (before, now)
    assert now <= 0.52 * before


def test_packed_weights_are_dropped_and_kept_again_where_that_is_asked_for() -> None:
    weight_cache.clear()
    model, x = wide(depth=1), torch.randn(4, 256)
    run = compiled(model, compiler="inductor")
    expected = call(run, (x,))
    assert weight_cache.stats().values
    amp_fx.store_low(model)(x)
    assert not weight_cache.stats().values
    call(run, (x,))
    assert not weight_cache.stats().values
    torch._dynamo.reset()
    found = call(compiled(model, compiler="inductor", freezing=True), (x,))
    assert weight_cache.stats().values
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _saved(model: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


# What stays


def is_eager() -> bool:
    return not torch.compiler.is_compiling()


def after_a_break(y: torch.Tensor, read: Callable[[torch.Tensor], Any], w: torch.Tensor) -> Any:
    torch._dynamo.graph_break()
    return y + read(w)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def not_compiled(weight: torch.Tensor) -> torch.Tensor:
    return weight.sum()


def written(w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return w.mul_(1.0)


STAYS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "read twice": lambda _, y, w: y * w.sum(),
    "read by eager code": lambda _, y, w: (y, w.sum()) if is_eager() else y,
    "read by compiled code": lambda _, y, w: y if is_eager() else y * w.sum(),
    "read with gradients": lambda _, y, w: y * w.sum() if torch.is_grad_enabled() else y,
    "its dtype": lambda x, y, w: (x * 1.1).to(w.dtype).sin() + y,
    "its size": lambda _, y, w: y * w.element_size(),
    "read between graphs": lambda _, y, w: after_a_break(y, not_compiled, w),
    "read in the next graph": lambda _, y, w: after_a_break(y, torch.sum, w),
    "returned": lambda _, y, w: (y, w),
    "returned as a view": lambda _, y, w: (y, w.t()),
    "written": lambda _, y, w: (y, written(w))[0],
    "cast to another dtype": lambda x, y, w: y + x.half() @ w.half(),
    "copied": lambda x, y, w: y + x @ w.clone(),
    "read in a transform": lambda x, y, w: y + torch.func.vmap(lambda row: row @ w)(x),
}
"""What a program does with its input, a product, and the weight of that product."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", STAYS.values(), ids=STAYS)
def test_a_weight_stays_that_anything_reads_otherwise(program: Callable[..., Any]) -> None:
    model = Program(lambda self, x: program(x, self.linear(x), self.linear.weight)).eval()
    with torch.no_grad():
        report = amp_fx.store_low(model)(torch.randn(2, 8))
    assert model.linear.weight.dtype == torch.float32
    [weight] = [weight for weight in report.weights if weight.path == "linear.weight"]
    assert weight.reason
    assert weight.reason in " ".join(str(report).split()), "however wide the terminal is"


def test_a_weight_is_stored_that_is_read_through_views() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        w = self.linear.weight
        products = [x @ part.t() for part in w.split(4)]
        return x @ w.t().unsqueeze(0).squeeze(0), *products, x @ w.expand(2, 8, 8)

    model = Program(forward).eval()
    with torch.no_grad():
        assert "linear.weight" in stored_names(amp_fx.store_low(model)(torch.randn(2, 8)))


def _tied() -> nn.Module:
    other = nn.Linear(8, 8)
    model = Program(lambda self, x: self.other(self.linear(x)), other=other)
    other.weight = model.linear.weight
    return model


def _buffer_over_a_weight() -> nn.Module:
    model = Program(lambda self, x: self.linear(x))
    model.linear.register_buffer("seen", model.linear.weight.detach()[:2])
    return model


def _held_as_an_attribute() -> nn.Module:
    model = Program(lambda self, x: self.linear(x))
    model.cached = [model.linear.weight.detach()]  # type: ignore[assignment]
    model.linear.plain = model.linear.weight.detach()
    return model


def _hooked() -> nn.Module:
    model = Program(lambda self, x: self.linear(x))
    model.linear.register_forward_hook(lambda *_: None)
    return model


def _parametrized() -> nn.Module:
    model = Program(lambda self, x: self.linear(x))
    parametrizations.weight_norm(model.linear)
    return model


def _identity_parametrized() -> nn.Module:
    model = Program(lambda self, x: self.linear(x))
    nn.utils.parametrize.register_parametrization(model.linear, "weight", nn.Identity())
    return model


@pytest.mark.parametrize(
    "make",
    [
        _tied,
        _buffer_over_a_weight,
        _held_as_an_attribute,
        _hooked,
        _parametrized,
        _identity_parametrized,
    ],
)
def test_a_weight_stays_that_others_may_reach(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    with torch.no_grad():
        report = amp_fx.store_low(model)(torch.randn(2, 8))
    assert not {name for name in stored_names(report) if "weight" in name}
    assert model.linear.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_other_dtypes_and_what_nothing_reads_stay() -> None:
    double = nn.Parameter(torch.randn(8, dtype=torch.float64))
    model = Program(lambda self, x: self.linear(x) + self.wide.float(), wide=double).eval()
    model.unused = nn.Linear(2, 2).eval()
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    report = amp_fx.store_low(model)(torch.randn(2, 8))
    reasons = {weight.path: weight.reason for weight in report.weights}
    assert reasons == {
        "linear.weight": "",
        "linear.bias": "",
        "wide": "is float64",
        "unused.weight": "no graph of this call reads it",
        "unused.bias": "no graph of this call reads it",
        "count": "is int64",
    }


def test_a_program_that_looks_at_numbers_is_run_on_a_copy() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and x.sum() > 1e9:
            x = x + self.linear.weight.sum()
        self.seen.append(1)
        y: torch.Tensor = self.linear(x)
        return y

    model = Program(forward).eval()
    model.seen = []  # type: ignore[assignment]
    assert amp_fx.store_low(model)(torch.randn(2, 8)).stored
    assert model.seen == []


def test_a_warning_says_that_nothing_was_stored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "amp_fx.stored"), torch.no_grad():
        program = Program(lambda self, x: (x + 1, self.linear.weight, self.linear.bias))
        amp_fx.store_low(program.eval())(torch.randn(2, 8))
    assert "no weight of Program was stored low: tied, or shares memory" in caplog.text


def test_weights_of_several_graphs_are_stored() -> None:
    """Those too that both graphs read, or only code that is not compiled."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            torch._dynamo.graph_break()
            x = self.second(self.first(x)).relu()
            return torch.compiler.disable(self.third)(x)  # type: ignore[no-any-return,no-untyped-call]

    model, x = Parts().eval(), torch.randn(2, 8)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        report = amp_fx.store_low(model)(x)
    assert stored_names(report) >= {"first.weight", "second.weight"}
    assert torch.equal(call(model, (x,)), call(plain, (x,)))
    compiled = [
        torch.compile(m, backend="amp_fx", options={"compiler": "eager"}) for m in (model, plain)
    ]
    assert torch.equal(*(call(m, (x,)) for m in compiled))


# State dicts


def test_state_dicts_save_and_load() -> None:
    model, x = mlp().eval(), torch.randn(2, 16)
    plain = copy.deepcopy(model)
    amp_fx.store_low(model)(x)
    expected = call(model, (x,))
    state = torch.load(_saved(model.state_dict()), weights_only=True)
    assert state["0.weight"].dtype == LOW

    other = mlp().eval()
    amp_fx.store_low(other)(x)
    other.load_state_dict(state)
    torch.testing.assert_close(call(other, (x,)), expected, rtol=0, atol=0)

    other.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
    other.load_state_dict(plain.state_dict())  # float32 ones are rounded as their casts were
    assert other[0].weight.dtype == LOW
    torch.testing.assert_close(call(other, (x,)), expected, rtol=0, atol=0)

    plain.load_state_dict(state)  # a float32 model takes them, and casts them back
    torch.testing.assert_close(call(plain, (x,)), expected, rtol=0, atol=0)


def test_a_model_on_meta_is_stored_before_it_is_loaded() -> None:
    with torch.device("meta"):
        model, x = wide(depth=2), torch.randn(4, 256)
    report = amp_fx.store_low(model)(x)
    assert len(report.stored) == 4
    loaded = wide(depth=2)
    model = model.to_empty(device="cpu")
    model.load_state_dict(loaded.state_dict())
    x = torch.randn(4, 256)
    torch.testing.assert_close(call(model, (x,)), call(loaded, (x,)), rtol=0, atol=0)
    weight_cache.clear()
    call(compiled(model, compiler="inductor"), (x,))
    assert weight_cache.stats().bytes == 0


# Errors, and the report


def test_a_model_in_training_is_refused() -> None:
    x = torch.randn(2, 16)
    with pytest.raises(UnsupportedError, match=r"training mode.*model\.eval"):
        amp_fx.store_low(mlp())
    half = mlp().eval()
    half[2].train()
    with pytest.raises(UnsupportedError, match="'2' is in training mode"):
        amp_fx.store_low(half)
    graded = mlp().eval()
    graded(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"0.weight has a gradient"):
        amp_fx.store_low(graded)
    later = mlp().eval()
    store = amp_fx.store_low(later)
    later.train()
    with pytest.raises(UnsupportedError):
        store(x)
    assert all(p.dtype == torch.float32 for p in later.parameters())


@pytest.mark.parametrize("is_made_before", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_does_not_train_stored_weights(kind: Any, is_made_before: bool) -> None:
    model, x = mlp().eval(), torch.randn(2, 16)
    optimizer = kind(model.parameters(), lr=1e-4) if is_made_before else None
    report = amp_fx.store_low(model)(x)
    assert report.stored
    optimizer = optimizer or kind(model.parameters(), lr=1e-4)
    optimizer.step()  # of no gradients
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    torch.autograd.backward(loss)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"would train Linear\.weight.*store_low"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    model.float()
    model.zero_grad()
    model(x).sum().backward()
    optimizer = kind(model.parameters(), lr=1e-4)
    optimizer.step()
    assert not torch.equal(next(iter(model.parameters())), before[0])


def test_frozen_stored_weights_do_not_stop_an_optimizer() -> None:
    model, x = mlp().eval(), torch.randn(2, 16)
    amp_fx.store_low(model)(x)
    model.requires_grad_(False)
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=1.0)
    torch.autograd.backward(other.sum())
    optimizer.step()
    assert torch.equal(other, torch.zeros(3))


def test_wrong_arguments_are_refused_and_nothing_changes() -> None:
    with pytest.raises(ArgumentTypeError, match=r"torch\.nn\.Module"):
        amp_fx.store_low(torch.sin)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="float32"):
        amp_fx.store_low(mlp().eval(), dtype="float32")(torch.randn(2, 16))
    model = mlp().eval()
    with pytest.raises(UnsupportedError, match=r"cannot be traced|does not run"):
        amp_fx.store_low(model)(torch.randn(2, 17))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_second_call_changes_nothing() -> None:
    model, x = wide(depth=1), torch.randn(4, 256)
    amp_fx.store_low(model)(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = amp_fx.store_low(model)(x)
    assert not report.stored
    assert "is bfloat16" in str(report)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
