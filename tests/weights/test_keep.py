"""``amp_fx.keep``: what it computes, keeps and refuses (``test_cached_values`` has the writes)."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import amp_fx
from amp_fx import weight_cache
from amp_fx.errors import OptionError, StaleWeightError
from amp_fx.weights.store import STORE
from tests.weights.cuda_like import alias

if TYPE_CHECKING:
    from collections.abc import Callable

    Value = Any

SIZE = 4


def weight(seed: int = 0, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*(shape or (SIZE, SIZE)), generator=generator))


def doubled(w: torch.Tensor) -> torch.Tensor:
    return w * 2


def packed(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Several tensors of several weights: each element of each weight counts."""
    flat = torch.cat([w.reshape(-1).double() for w in weights])
    first = weights[0].t().clone(memory_format=torch.contiguous_format)
    return flat.float().bfloat16(), flat.cumsum(0), first


def assert_same(actual: Value, expected: Value) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------- never stale


NUM_ROWS, NUM_COLUMNS = 70, 80


def whole_of() -> torch.Tensor:
    """Returns the larger tensor; its elements differ, and are as large as those of weights."""
    numbers = torch.arange(1.0, 1 + NUM_ROWS * NUM_COLUMNS) / (NUM_ROWS * NUM_COLUMNS)
    return numbers.view(NUM_ROWS, NUM_COLUMNS)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda big: big,
    "columns": lambda big: big[:, :40],
    "one_column": lambda big: big[:, 3:4],
    "every_second_row": lambda big: big[::2],
    "every_second_element": lambda big: big[1::3, ::2],
    "expanded": lambda big: big[2].expand(70, -1),
    "expanded_behind": lambda big: big[:, 1:2].expand(-1, 64),
    "transposed_part": lambda big: big[:7, :50].t(),
    "dimensions": lambda big: big.view(10, 7, 80)[::2, 1:6, 3:60:2],
    "channels_last": lambda big: big.view(2, 7, 80, 5).permute(0, 3, 1, 2),
    "one_element": lambda big: big[3, 3],
}


def read_by(kind: str) -> Any:
    """Returns which elements of the whole a weight has."""
    positions = torch.arange(NUM_ROWS * NUM_COLUMNS).view(NUM_ROWS, NUM_COLUMNS)
    return torch.isin(positions, STRIDED[kind](positions)).numpy()


@pytest.mark.parametrize("kind", STRIDED)
def test_a_whole_weight_with_gaps_or_an_expanded_one(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    big = whole_of()
    array, is_read = big.numpy(), read_by(kind)
    w = nn.Parameter(STRIDED[kind](big))
    kept = amp_fx.keep(doubled, w)
    for _ in range(70):
        array[~is_read] += 1.0  # of which the weight has nothing
        assert_same(kept(), w.detach().clone() * 2)
    assert not caplog.records
    for _ in range(3):
        array[is_read] += 1.0
        assert_same(kept(), w.detach().clone() * 2)
        assert not kept.is_fresh()
    assert "PyTorch cannot see" in kept.why_remade
    assert len([r for r in caplog.records if "where PyTorch cannot see it" in r.message]) == 1


@pytest.mark.parametrize("part", [32, 64])
def test_a_part_that_is_written_through_an_old_array_is_found_within_64_calls(part: int) -> None:
    """Writes a 32nd of a weight or more, so that one of its 64 stretches is inside the part."""
    for seed in range(5):
        w = weight(seed, 64, 32)
        array = w.detach().numpy().reshape(-1)
        kept = amp_fx.keep(doubled, w)
        kept()
        start = 300 * seed + 11
        array[start : start + array.size // part * 2] += 1.0
        found = [torch.equal(kept(), w.detach() * 2) for _ in range(64)]
        assert found[-1]


def test_full_verification_raises_at_one_element_and_off_compares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = weight(0, 64, 64)
    array = w.detach().numpy()
    off, full = (amp_fx.keep(doubled, w, verify=verify) for verify in ("off", "full"))
    raising = [full]
    for level in ("full", "1"):
        monkeypatch.setenv("AMP_FX_VERIFY", level)
        raising.append(amp_fx.keep(doubled, w))
    monkeypatch.setenv("AMP_FX_VERIFY", "no such level")
    raising.append(amp_fx.keep(doubled, w, verify="full"))
    before, *_ = [kept().clone() for kept in (off, *raising)]
    array[3, 5] += 1.0
    assert_same(off(), before)
    for kept in raising:
        with pytest.raises(StaleWeightError, match=r"weight 0 of doubled"):
            kept()


# ---------------------------------------------------------------------- made once, in one place


def test_a_value_is_made_once_per_update_of_its_weights() -> None:
    calls = []

    def count(w: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        assert not w.requires_grad
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()
        return w.bfloat16()

    w = weight()
    kept = amp_fx.keep(count, w)
    assert calls == []
    assert (kept.bytes, kept.is_fresh()) == (0, False)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        value = kept()
    assert not value.is_inference()
    assert not value.requires_grad
    for _ in range(3):
        assert kept() is value
    assert (kept.bytes, kept.is_fresh(), kept.why_remade) == (2 * SIZE * SIZE, True, "")
    with torch.no_grad():
        w.add_(1)
        w.mul_(2)
    kept()
    assert calls == [False, False]


def test_invalidate_clear_and_limits() -> None:
    first, second = weight(0), weight(1)
    array = first.detach().numpy()
    one, other = amp_fx.keep(doubled, first, verify="off"), amp_fx.keep(packed, first, second)
    one(), other()
    stats = weight_cache.stats()
    assert (stats.entries, stats.bytes) == (2, one.bytes + other.bytes)
    assert {value.model for value in stats.values} == {"doubled", "packed"}
    assert one.bytes == 4 * SIZE * SIZE
    one()
    assert weight_cache.stats().by_model["doubled"].hits == 1
    array[3, 2] += 1.0  # unseen
    one.invalidate()
    assert (one.is_fresh(), other.is_fresh()) == (False, True)
    assert_same(one(), first.detach() * 2)
    assert one.is_fresh()
    for invalidated in (first, None):
        weight_cache.invalidate(invalidated)
        assert (one.is_fresh(), other.is_fresh()) == (False, False)
        one(), other()
    weight_cache.invalidate(second)
    assert (one.is_fresh(), other.is_fresh()) == (True, False)
    weight_cache.clear()
    assert (one.is_fresh(), one.bytes, weight_cache.stats().entries) == (False, 0, 0)
    one()
    weight_cache.set_limit(0)
    assert (one.bytes, weight_cache.stats().bytes) == (0, 0)
    assert_same(one(), first.detach() * 2)
    first.data.add_(1)
    assert_same(one(), first.detach() * 2)
    assert not one.is_fresh()


# ------------------------------------------------------------------------------------ lifetime


def test_a_weight_that_is_gone_is_named_and_its_value_freed() -> None:
    w = weight()
    kept = amp_fx.keep(doubled, w)
    kept()
    del w
    gc.collect()
    assert weight_cache.stats().entries == 0
    assert repr(kept).endswith(": a weight was freed>")
    uses: list[Callable[[], Any]] = [kept, kept.is_fresh, kept.invalidate]
    uses += [lambda: kept.bytes, lambda: kept.why_remade]
    for use in uses:
        with pytest.raises(OptionError, match=r"a weight of doubled was freed"):
            use()


def test_a_tensor_that_only_the_call_held_is_gone() -> None:
    w = weight()
    with pytest.raises(OptionError, match=r"not its \.data"):
        amp_fx.keep(doubled, w.data)()


class Packs(nn.Module):
    """Keeps what its own method computes, as modules will."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weight()
        self.packed = amp_fx.keep(self.pack, self.weight)

    def pack(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed()  # type: ignore[no-any-return]


def test_a_module_that_keeps_its_own_weights_is_freed() -> None:
    model = Packs()
    model(torch.ones(1, SIZE))
    refs: list[Any] = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(model.packed)]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert weight_cache.stats().entries == 0


def test_a_value_goes_with_what_keeps_it() -> None:
    w = weight()
    kept = amp_fx.keep(doubled, w)
    kept()
    del kept
    gc.collect()
    assert weight_cache.stats().entries == 0


def test_a_copied_model_keeps_values_of_its_own_weights() -> None:
    model = Packs()
    x = torch.eye(SIZE)
    model(x)
    clone = copy.deepcopy(model)
    clone.weight.data.add_(1)
    assert_same(clone(x), clone.weight.detach() * 2)
    assert_same(model(x), model.weight.detach() * 2)
    assert list(clone.state_dict()) == ["weight"]


def test_it_cannot_be_pickled() -> None:
    kept = amp_fx.keep(doubled, weight())
    with pytest.raises(TypeError, match=r"cannot pickle .* call amp_fx.keep again"):
        pickle.dumps(kept)
    assert copy.copy(kept) is kept


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_a_weight_that_becomes_its_conjugate_or_negative_in_place(kind: str) -> None:
    """Sets a conjugate or negative bit of a weight with the same storage and strides."""
    z = torch.randn(SIZE, SIZE, dtype=torch.complex64)
    w = z.clone() if kind == "conj" else z.imag.clone()
    w.data = z if kind == "conj" else z.imag
    kept = amp_fx.keep(lambda w: (w * 2).resolve_conj(), w)
    before = kept().clone()
    w.data = z.conj() if kind == "conj" else z.conj().imag
    assert_same(kept(), before.conj().resolve_conj() if kind == "conj" else -before)


# ------------------------------------------------------------------------- functions that fail

GLOBAL = torch.ones(SIZE, SIZE)


def writes_weight(w: torch.Tensor) -> torch.Tensor:
    return w.mul_(2) + 1


BAD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "reads a global": (lambda w: w + GLOBAL, r"reads a tensor of shape \(4, 4\) that is not among"),
    "reads a number of a global": (lambda w: w + float(GLOBAL[0, 0]), "that is not among"),
    "reads another weight": (
        (lambda other: lambda w: torch.cat([w, other]))(weight(5)),
        "that is not among",
    ),
    "returns a global": (lambda w: (w + 1, GLOBAL), "that it did not compute"),
    "returns the weight": (lambda w: w, "returns a view of a weight"),
    "returns a view": (lambda w: w.t(), "returns a view of a weight"),
    "returns a view that begins later": (lambda w: w[1:, 2:], "returns a view of a weight"),
    "returns a view among others": (lambda w: (w + 1, w.detach()), "returns a view of a weight"),
    "returns no cast, as there is none": (lambda w: w.float(), "returns a view of a weight"),
    "needs gradients": (
        lambda w: torch.enable_grad()(w.clone().requires_grad_().mul)(2),
        "requires a gradient",
    ),
    "returns a parameter": (lambda w: nn.Parameter(w * 2), "requires a gradient"),
    "adds random numbers": (lambda w: torch.rand(SIZE) * w, "draws random numbers"),
    "permutes": (lambda w: w[torch.randperm(SIZE)], "draws random numbers"),
    "fills by a normal": (lambda w: torch.empty_like(w).normal_() + w, "draws random numbers"),
    "drops": (lambda w: functional.dropout(w, 0.5), "draws random numbers"),
    "draws in Python": (lambda w: w * random.random(), "draws random numbers"),
    "draws in NumPy": (lambda w: w * float(np.random.rand()), "draws random numbers"),
    "writes the weight": (writes_weight, "writes to a weight"),
    "writes a view": (lambda w: w[0].fill_(1) + 1, "writes to a weight"),
    "writes by a list op": (lambda w: (torch._foreach_mul_([w], 2.0), w + 1)[1], "writes to a"),
    "writes by out=": (lambda w: torch.mul(w, 2, out=w) + 1, "writes to a weight"),
    "resizes the weight": (lambda w: w.resize_(2, 2) + 1, "writes to a weight"),
    "returns None": (lambda _: None, "got NoneType"),
    "returns a number": (lambda w: w.shape[0], "got int"),
    "returns a dictionary": (lambda w: {"w": w + 1}, "got dict"),
    "returns an empty tuple": (lambda _: (), "got nothing"),
    "returns tuples in a tuple": (lambda w: ((w + 1,), w + 2), "got tuple, Tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_function_that_does_what_cannot_be_kept_is_refused(case: str) -> None:
    fn, message = BAD[case]
    w = weight()
    before = w.detach().clone()
    kept = amp_fx.keep(fn, w)
    for _ in range(2):
        with pytest.raises(OptionError, match=message):
            kept()
        assert_same(w.detach(), before)
        assert (w.shape, kept.bytes, kept.is_fresh()) == (before.shape, 0, False)
    assert_same(amp_fx.keep(doubled, w)(), before * 2)


def test_a_view_that_is_returned_only_later_is_refused() -> None:
    w = weight()
    answers: list[Callable[[torch.Tensor], torch.Tensor]]
    answers = [lambda w: w + 1, lambda w: w.t(), lambda w: w + 3]

    def answer(w: torch.Tensor) -> torch.Tensor:
        return answers.pop(0)(w)

    kept = amp_fx.keep(answer, w)
    kept()
    w.data.add_(1)
    with pytest.raises(OptionError, match="view of a weight"):
        kept()
    assert_same(kept(), w.detach() + 3)


def test_a_function_that_raises_is_asked_again() -> None:
    w = weight()
    faults = [RuntimeError("no"), None, RuntimeError("not now"), KeyboardInterrupt(), None]

    def raises(w: torch.Tensor) -> torch.Tensor:
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        return w * 2

    kept = amp_fx.keep(raises, w)
    with pytest.raises(RuntimeError, match="no"):
        kept()
    old = kept()
    assert_same(old, w.detach() * 2)
    then = old.clone()
    w.data.add_(1)
    for kind in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(kind):
            kept()
        assert not kept.is_fresh()
    assert_same(kept(), w.detach() * 2)
    assert_same(old, then)


@pytest.mark.parametrize("is_held", [False, True])
def test_results_may_change_their_shapes_dtypes_and_number(is_held: bool) -> None:
    results: list[Callable[[torch.Tensor], Any]] = [
        lambda w: w * 2,
        lambda w: w[:2] * 2,
        lambda w: (w * 2).half(),
        lambda w: (w * 2).t(),
        lambda w: (w * 2, w + 1),
        lambda w: [w + 1, w.sum(), w.double()],
        lambda w: w.sum(),
        lambda w: w.sum().expand(SIZE, SIZE),
        lambda w: w.max().expand(SIZE, SIZE),
        lambda w: w.sum().expand(SIZE, SIZE).data,
        lambda w: w.max().expand(SIZE, SIZE).data,
        lambda w: (w * 2).chunk(2),
        lambda w: (w * 3).chunk(2),
        lambda w: w.sort(),
        lambda w: w.new_zeros(0, 3),
        lambda w: torch.complex(w, w + 1).conj(),
        lambda w: torch.complex(w, w + 1),
    ]
    w = weight()
    turn = [0]

    def result(w: torch.Tensor) -> Any:
        return results[turn[0]](w)

    kept = amp_fx.keep(result, w)
    held: list[tuple[Any, Any]] = []
    for i in (*range(len(results)), *reversed(range(len(results)))):
        turn[0] = i
        w.data.add_(1)
        expected = results[i](w.detach())
        expected = tuple(expected) if isinstance(expected, (list, tuple)) else expected
        value = kept()
        assert_same(tuple(value) if isinstance(value, tuple) else value, expected)
        if is_held:
            held.append((value, expected))
        del value
    for value, expected in held:
        assert_same(tuple(value) if isinstance(value, tuple) else value, expected)


RESULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda w: w.relu().to_sparse(),
    "sparse rows": lambda w: w.relu().to_sparse_csr(),
    "oneDNN": lambda w: (w * 2).to_mkldnn(),
    "quantized": lambda w: torch.quantize_per_tensor(w, float(w.abs().amax()), 3, torch.qint8),
    "quantized by channel": lambda w: torch.quantize_per_channel(
        w, torch.full((SIZE,), 0.1), torch.zeros(SIZE), 0, torch.qint8
    ),
    "conjugate": lambda w: torch.complex(w, w).conj(),
    "nan": lambda w: (w * torch.nan).to(torch.complex128),
}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # quantized tensors will go
@pytest.mark.filterwarnings("ignore:Sparse")
def test_results_of_any_layout_are_kept_and_compared(result: str) -> None:
    def dense(value: torch.Tensor) -> torch.Tensor:
        return value.dequantize() if value.is_quantized else value.to_dense()

    w = weight()
    kept = amp_fx.keep(RESULTS[result], w, verify="full")
    for _ in range(4):
        assert_same(dense(kept()), dense(RESULTS[result](w.detach())))
        assert kept() is kept()
        w.data.mul_(-1.5)
    array = w.detach().numpy()
    kept()
    array += 1
    with contextlib.nullcontext() if result == "nan" else pytest.raises(StaleWeightError):
        kept()


SMALL: dict[str, torch.Tensor] = {
    "no element": torch.empty(0, 4),
    "no dimension": torch.tensor(3.0),
    "integers": torch.arange(6),
    "bits": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "float8": torch.randn(8).to(torch.float8_e4m3fn),
    "wide elements": torch.randn(3, dtype=torch.complex128),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "strided": torch.randn(6, 6)[::2, ::3],
}


@pytest.mark.parametrize("kind", SMALL)
def test_weights_of_all_dtypes_and_sizes(kind: str) -> None:
    w = SMALL[kind].clone(memory_format=torch.preserve_format)
    w = w.as_strided(SMALL[kind].size(), SMALL[kind].stride()) if kind == "expanded" else w
    kept = amp_fx.keep(lambda w: w.clone(memory_format=torch.contiguous_format), w)
    for _ in range(3):
        assert_same(kept(), w.clone())
        if kind == "expanded":
            torch.empty(0).set_(w.untyped_storage()).fill_(1)
        else:
            w.copy_((w.float() if kind == "float8" else w).flip(0))


def test_a_function_may_be_compiled_or_use_numpy_constants_or_a_seed() -> None:
    w = weight()
    compiled = torch.compile(lambda w: (w * 2).relu(), backend="aot_eager")
    fns: list[Callable[[torch.Tensor], torch.Tensor]] = [
        compiled,
        lambda w: compiled(w).t().contiguous(),
        lambda w: torch.tensor(np.linalg.inv(w.numpy())) + 1,
        lambda w: w + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.eye(SIZE),
        lambda w: w @ torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)),
        torch.neg,
        nn.functional.softplus,
    ]
    keeps = [amp_fx.keep(fn, w) for fn in fns]
    for _ in range(3):
        for fn, kept in zip(fns, keeps, strict=True):
            assert_same(kept(), fn(w.detach()))
        w.data.add_(1)


# ------------------------------------------------------------------------------------- weights


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_no_weight_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match="needs at least one weight"):
        amp_fx.keep(doubled)
    with pytest.raises(OptionError, match="expects a function of the weights, got 3"):
        amp_fx.keep(3, weight())  # type: ignore[arg-type]
    for bad in (None, 1.0, nn.Linear(2, 2), [weight()]):
        with pytest.raises(OptionError, match=f"weights must be tensors, got {type(bad).__name__}"):
            amp_fx.keep(doubled, bad)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="meta device has no data"):
        amp_fx.keep(doubled, torch.empty(2, device="meta"))
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for unwatchable in (torch.eye(3).to_sparse(), torch.eye(3).to_mkldnn(), quantized):
        with pytest.raises(OptionError, match="cannot be watched"):
            amp_fx.keep(doubled, unwatchable)
    with pytest.raises(ValueError, match="'sample', 'full' or 'off', got 'always'"):
        amp_fx.keep(doubled, weight(), verify="always")


class Wrapped(torch.Tensor):
    """A subclass that changes nothing."""


def of_numpy() -> tuple[torch.Tensor, Callable[[], Any]]:
    array = np.ones((SIZE, SIZE), dtype=np.float32)

    def write() -> None:
        array[1, 2] += 1.0

    return torch.from_numpy(array), write


def of_subclass() -> tuple[torch.Tensor, Callable[[], Any]]:
    w = torch.randn(SIZE, SIZE).as_subclass(Wrapped)
    array = w.detach().numpy()
    return w, lambda: array.__setitem__((1, 2), array[1, 2] + 1)


def of_wrapper() -> tuple[torch.Tensor, Callable[[], Any]]:
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    w = TwoTensor(a, b)  # type: ignore[no-untyped-call]
    return w, lambda: (a.add_(1), b.add_(1))


REMADE: dict[str, tuple[Callable[[], Any], str]] = {
    "NumPy array": (of_numpy, "PyTorch did not allocate"),
    "subclass": (of_subclass, "a weight is a Wrapped, a subclass"),
    "subclass of two tensors": (of_wrapper, "a weight is a TwoTensor, a subclass"),
}


@pytest.mark.parametrize("kind", REMADE)
def test_what_cannot_be_watched_is_remade_at_every_use_and_it_says_so(kind: str) -> None:
    make, reason = REMADE[kind]
    w, write = make()
    plain = weight()
    keeps = [amp_fx.keep(doubled, w), amp_fx.keep(lambda a, b: (b + 1) * 2 + a, plain, w)]

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.a if isinstance(tensor, TwoTensor) else tensor.as_subclass(torch.Tensor)

    for _ in range(3):
        now = seen(w.detach()).clone()
        assert_same(seen(keeps[0]()), now * 2)
        assert_same(seen(keeps[1]()), (now + 1) * 2 + plain.detach())
        for kept in keeps:
            assert reason in kept.why_remade
            assert (kept.is_fresh(), kept.bytes) == (False, 0)
        write()
    assert weight_cache.stats().entries == 0


def test_weights_made_in_inference_mode_have_no_version_and_are_kept() -> None:
    """PyTorch refuses to write to them through an op outside of that mode."""
    with torch.inference_mode():
        w = torch.randn(SIZE, SIZE)
        kept = amp_fx.keep(doubled, w)
        first = kept()
        assert kept() is first
        w.add_(1)
        assert_same(kept(), w * 2)
    assert kept.why_remade == ""
    assert not kept().is_inference()
    with torch.inference_mode():
        w.copy_(torch.ones(SIZE, SIZE))
    assert_same(kept(), torch.full((SIZE, SIZE), 2.0))
    x = torch.randn(2, SIZE, requires_grad=True)
    (x @ kept()).sum().backward()  # an inference tensor cannot be saved for a backward
    assert x.grad is not None


# ----------------------------------------------------------------- compilers, modes, transforms


BACKENDS = ("eager", "aot_eager")


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_compiled_code_a_value_is_an_input_that_is_right_after_writes(backend: str) -> None:
    model = Packs()
    pair = amp_fx.keep(lambda w: (w + 1, w.sum()), model.weight)
    x = torch.randn(2, SIZE)
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        data, total = pair()
        out: torch.Tensor = torch.relu(model.packed().sum(0) * x) + data.sum() * total
        return out

    with torch.no_grad():
        for _ in range(4):
            w = model.weight.detach().clone()
            expected = torch.relu((w * 2).sum(0) * x) + (w + 1).sum() * w.sum()
            torch.testing.assert_close(compiled(x), expected)
            model.weight.data.add_(1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "amp_fx"])
def test_in_compiled_code_gradients_flow_past_a_value_and_not_into_it(backend: str) -> None:
    """The model keeps its own weights, and is freed with its compiled code."""
    model = Packs()
    model.weight.data = torch.randn(SIZE, SIZE).bfloat16().float()
    x = torch.ones(2, SIZE, requires_grad=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        (grad,) = torch.autograd.grad(compiled(x)[:, :1].sum(), x)
        assert_same(grad, (model.weight[:, 0] * 2).detach().expand(2, SIZE))
        model.weight.data.mul_(2)
    assert model.weight.grad is None
    refs: list[Any] = [weakref.ref(model), weakref.ref(model.weight)]
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_in_compiled_code_other_shapes_are_compiled_again() -> None:
    w = weight()
    columns = [SIZE]

    def cut(w: torch.Tensor) -> torch.Tensor:
        return w[:, : columns[0]] * 2

    kept = amp_fx.keep(cut, w)
    compiled = torch.compile(lambda x: x @ kept(), backend="eager", fullgraph=True)
    for columns[0] in (SIZE, 2, 1, SIZE):
        w.data.add_(1)
        assert_same(compiled(torch.eye(SIZE)), w.detach()[:, : columns[0]] * 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_that_writes_a_weight_has_the_value_of_before(backend: str) -> None:
    """A limit: a graph reads its inputs when it begins. A graph break lets it read again."""
    w = weight()
    kept = amp_fx.keep(doubled, w)

    def update_and_use(x: torch.Tensor, is_one_graph: bool) -> torch.Tensor:
        with torch.no_grad():
            w.data.mul_(2)
        if not is_one_graph:
            torch._dynamo.graph_break()
        out: torch.Tensor = x + kept()
        return out

    compiled = torch.compile(update_and_use, backend=backend)
    for is_one_graph in (True, False, True, True, False):
        before = w.detach().clone()
        out = compiled(torch.zeros(SIZE, SIZE), is_one_graph)
        torch.testing.assert_close(out, before * (2 if is_one_graph else 4))
        assert_same(w.detach(), before * 2)
        assert_same(kept(), before * 4)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_in_compiled_code_a_refused_function_is_named(fullgraph: bool) -> None:
    w = weight()
    kept = amp_fx.keep(lambda w: w.t(), w)
    compiled = torch.compile(lambda x: x @ kept(), backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match="returns a view of a weight, which needs no cache"):
        compiled(torch.eye(SIZE))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # of what torch.func.jvp imports
def test_what_a_transform_or_mode_asks_for_first_is_kept_as_it_is() -> None:
    """Neither a wrapper of ``torch.func`` nor a fake tensor outlives what it was made under."""
    w = weight()
    x = torch.randn(3, SIZE)
    uses: list[Callable[[Any], Any]] = [
        lambda kept: torch.vmap(lambda x: x @ kept())(x),
        lambda kept: torch.func.grad(lambda x: (x @ kept()).sum())(x[0]),
        lambda kept: torch.func.jvp(lambda x: x @ kept(), (x,), (x,)),
    ]
    for use in uses:
        kept = amp_fx.keep(doubled, w)
        use(kept)
        assert type(kept()) is torch.Tensor
        assert_same(kept() + 1, w.detach() * 2 + 1)
    kept = amp_fx.keep(doubled, w)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kept()
    assert type(kept()) is torch.Tensor
    assert_same(kept(), w.detach() * 2)


@pytest.mark.parametrize("strict", [False, True])
def test_what_would_be_a_constant_of_an_exported_program_is_refused(strict: bool) -> None:
    """A program whose parameters are loaded anew would go on with the value of the old ones."""
    with pytest.raises(Exception, match=r"torch.export would turn the value .* into a constant"):
        torch.export.export(Packs(), (torch.randn(3, SIZE),), strict=strict)


def test_a_value_does_not_depend_on_the_default_device_of_its_first_call() -> None:
    w = weight()
    kept = amp_fx.keep(lambda w: w * torch.arange(SIZE), w)
    with torch.device("meta"):
        assert kept().device.type == "cpu"
    assert_same(kept(), w.detach() * torch.arange(SIZE))


# ----------------------------------------------------------------------- threads and processes


def test_a_thread_that_compiles_and_one_that_makes_a_value_with_compiled_code_go_on() -> None:
    """Needs in each thread a lock that the other one holds: the store's and Dynamo's."""
    w, is_made, is_compiling = weight(), threading.Event(), threading.Event()

    def made(w: torch.Tensor) -> torch.Tensor:
        is_made.set()
        is_compiling.wait(1)
        return torch.compile(doubled, backend="eager")(w)

    def compile_amp_fx() -> None:
        is_made.wait(10)
        is_compiling.set()
        with torch.no_grad():
            torch.compile(nn.Linear(SIZE, SIZE), backend="amp_fx")(torch.randn(2, SIZE))

    kept = amp_fx.keep(made, w)
    threads = [threading.Thread(target=f, daemon=True) for f in (kept, compile_amp_fx)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "they wait for each other"
    assert_same(kept(), w.detach() * 2)


def test_the_cost_of_an_update_does_not_grow_with_what_else_is_kept() -> None:
    """Counted: how often a value that is made again asks others whether they hold it."""
    weights = [weight() for _ in range(50)]
    keeps = [amp_fx.keep(doubled, w) for w in weights]
    for kept in keeps:
        kept()
    asked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        for call in {call for entry in STORE.entries.values() for call in entry.calls}:
            patch.setattr(call, "evict", functools.partial(asked.append, call))
        for kept in keeps:
            kept.invalidate()
            kept()
    assert len(asked) <= len(keeps)


@pytest.mark.parametrize("first", ["by the thread", "by both"])
def test_a_write_that_began_while_nothing_was_watched_is_waited_for(first: str) -> None:
    """A thread that was seen writing writes again, and a call comes in between.

    The thread is at work, has its pointer and has not written all: that is what an op looks like
    in the midst of a write.
    """
    w = nn.Parameter(torch.zeros(64, 64))
    kept = amp_fx.keep(doubled, w, verify="off")
    kept()
    has_begun, is_called = threading.Event(), False

    def write() -> None:
        w.data.fill_(1)
        through = alias(w.detach())
        has_begun.set()
        while not is_called:
            time.sleep(0)
        through.fill_(2)

    writer = threading.Thread(target=write)
    writer.start()
    assert has_begun.wait(10)
    if first == "by both":
        w.data[0] = 3
    kept()
    is_called = True
    writer.join()
    time.sleep(0.2)
    kept()
    assert_same(kept(), torch.full((64, 64), 4.0))
