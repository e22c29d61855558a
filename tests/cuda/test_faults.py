"""The comparison of amp_fx with eager autocast finds each planted fault.

One program contains what the faults need: products, ops in float32, promotion, weights that are
read more than once, nested regions, writes. It is compared with and without a region and in both
dtypes, in training and inference, over several calls with updates of the weights in between.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cuda import needs

needs.start()

from tests.cuda.faults import FAULTS, other  # noqa: E402
from tests.cuda.nets import is_same  # noqa: E402
from tests.parity.oracle import LOW_DTYPES, Way, cast_like, region_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = 8
NUM_CALLS = 4


class Program(nn.Module):
    """Products, float32 ops, promotion, nested regions and writes in one program."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.third = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> list[Tensor]:
        # Eager mode caches one cast of a leaf, whatever the dtype of a region inside.
        y = self.first(x)
        z = 1.5 * x  # float32, and read by two products
        scores = functional.softmax(y @ y.mT, -1)
        joined = torch.cat([x, self.second(z) + torch.mm(z, self.first.weight)])
        with torch.autocast("cuda", enabled=False):
            plain = x @ self.second.weight
        with torch.autocast("cuda", torch.float16):
            half = self.third(x + 0.0)
        written = 2.0 * x
        before = written @ self.first.weight
        written = written.mul_(0.5)
        after = written @ self.first.weight
        trip = functional.softmax(x.to(torch.bfloat16), -1)
        powers = self.norm(y).pow(2) + y.pow(2)
        return [y, scores, joined.sum(-1), plain, half, before, after, trip, powers]


def make() -> tuple[Program, Tensor]:
    torch.manual_seed(0)
    model, x = Program(), torch.randn(SIZE, SIZE)
    return model.cuda(), x.cuda()


def results(
    compile_: Callable[[Any], Any], way: Way, dtype: torch.dtype, *, is_trained: bool
) -> list[Tensor]:
    """Returns outputs and gradients of some calls; weights are written before the third and later.

    With ``AMBIENT``, the last call runs in a region of the other low dtype.
    """
    model, x = make()
    program, found = compile_(model), list[Tensor]()
    for call in range(NUM_CALLS):
        if call > 1:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.7)
        model.zero_grad()
        given = x.detach().clone().requires_grad_(is_trained)
        used = other(dtype) if call == NUM_CALLS - 1 else dtype
        region = used if way is Way.AMBIENT else None
        with torch.set_grad_enabled(is_trained), region_of("cuda", region):
            outputs = program(given)
        found += [out.detach().clone() for out in outputs]
        if is_trained:
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
            tensors = (given, *model.parameters())
            found += [t.grad.clone() for t in tensors if t.grad is not None]
    return found


def expected(way: Way, dtype: torch.dtype, *, is_trained: bool) -> list[Tensor]:
    """Returns the results of eager autocast; ``BARE`` restores the plain program's dtypes."""
    if way is Way.AMBIENT:
        return results(lambda model: model, way, dtype, is_trained=is_trained)

    def in_region(model: Any) -> Any:
        def run(x: Tensor) -> list[Any]:
            with torch.no_grad():
                plain = model(x)
            with region_of("cuda", dtype):
                outputs = model(x)
            return [cast_like(out, like) for out, like in zip(outputs, plain, strict=True)]

        return run

    return results(in_region, way, dtype, is_trained=is_trained)


def differences(way: Way, dtype: torch.dtype, *, is_trained: bool, **options: Any) -> list[int]:
    """Returns the indices of results that differ from those of eager autocast."""
    torch._dynamo.reset()
    given: dict[str, Any] = {"compiler": "aot_eager", "fallback": False}
    given |= {"weight_cache": "training", **options}
    if way is Way.BARE:
        given["dtype"] = dtype

    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="amp_fx", options=given)

    actual = results(compiled, way, dtype, is_trained=is_trained)
    wanted = expected(way, dtype, is_trained=is_trained)
    if len(actual) != len(wanted):
        return [-1]
    pairs = enumerate(zip(actual, wanted, strict=True))
    return [i for i, (mine, theirs) in pairs if not is_same(mine, theirs)]


def differences_or_error(*args: Any, **kwargs: Any) -> list[int]:
    """Returns the differences; an error that torch raises because of the fault counts as one."""
    try:
        return differences(*args, **kwargs)
    except (RuntimeError, AssertionError):
        return [-1]


SETTINGS = list(itertools.product(Way, LOW_DTYPES, (True, False)))


@pytest.mark.parametrize(("way", "dtype", "is_trained"), SETTINGS)
def test_without_a_fault_all_bits_are_eagers(
    way: Way, dtype: torch.dtype, is_trained: bool
) -> None:
    assert differences(way, dtype, is_trained=is_trained) == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = FAULTS[name](monkeypatch) or {}
    found = []
    for way, dtype, is_trained in SETTINGS:
        found += differences_or_error(way, dtype, is_trained=is_trained, **options)
    assert found, "no comparison finds it"
