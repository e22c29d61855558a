"""reuse_casts: casts move across selections, and no bits change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.reuse_casts import ReuseCasts
from tests.exporting.graphs import exported
from tests.programs import graph_text

if TYPE_CHECKING:
    from collections.abc import Callable

SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(-1, -2),
    "reshape": lambda x: x.reshape(x.shape).flatten(2).reshape(x.shape),
    "slices": lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1),
    "relu": torch.relu,
    "maximum": lambda x: nn.functional.max_pool2d(x, 3, 1, 1),
    "nearest": lambda x: nn.functional.interpolate(x, scale_factor=2.0)[..., ::2, ::2],
    "stack": lambda x: torch.stack([x, x.flip(0)])[0],
}


class Selects(nn.Module):
    """Casts before and after selections; the first value is also read in float32."""

    def __init__(self, names: list[str], *, is_read: bool, is_narrowed: bool) -> None:
        super().__init__()
        self.names, self.is_read, self.is_narrowed = names, is_read, is_narrowed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        cast: Any = torch.ops.aten._to_copy.default
        low, wide = torch.bfloat16, torch.float32
        before, after = (wide, low) if self.is_narrowed else (low, wide)
        first = y = cast(x * 2, dtype=before)
        for name in self.names:
            y = SELECTIONS[name](y)
        result = cast(y, dtype=after).exp()
        return (result, cast(first, dtype=after).sin()) if self.is_read else (result,)


def casts(gm: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default))


@given(
    names=st.lists(st.sampled_from(sorted(SELECTIONS)), min_size=1, max_size=4),
    is_read=st.booleans(),
    is_narrowed=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_bits_stay(*, names: list[str], is_read: bool, is_narrowed: bool) -> None:
    torch.manual_seed(1234)
    x = torch.randn(2, 2, 4, 4, dtype=torch.bfloat16 if is_narrowed else torch.float32)
    model = Selects(names, is_read=is_read, is_narrowed=is_narrowed)
    gm = exported(model, x)
    before = casts(gm)
    [report] = run_passes(gm, [ReuseCasts()])
    # A float32 value that is read in the low dtype twice, or widened between low values.
    assert report.counts["casts_reused"] == int(is_read or is_narrowed)
    assert casts(gm) == before - report.counts["casts_reused"] - int(is_narrowed and not is_read)
    for found, expected in zip(gm(x), model(x), strict=True):
        assert found.dtype is expected.dtype
        assert found.equal(expected)
    assert not ReuseCasts().call(gm).modified


def test_golden() -> None:
    gm = exported(Selects(["transpose"], is_read=True, is_narrowed=False), torch.randn(4, 4))
    run_passes(gm, [ReuseCasts()])
    assert graph_text(gm).splitlines() == [
        "graph(x: f32)",
        "mul: f32 = aten.mul.Tensor(x, 2)",
        "to_copy: bf16 = aten._to_copy.default(mul, dtype=torch.bfloat16)",
        "to_copy_1: f32 = aten._to_copy.default(to_copy, dtype=torch.float32)",
        "transpose: f32 = aten.transpose.int(to_copy_1, -1, -2)",
        "exp: f32 = aten.exp.default(transpose)",
        "sin: f32 = aten.sin.default(to_copy_1)",
        "return (exp, sin)",
    ]


class Kept(nn.Module):
    """Casts that other casts would replace, rounded arithmetic, and other readers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        cast: Any = torch.ops.aten._to_copy.default
        wide = cast(x, dtype=torch.float32)
        low, other = torch.bfloat16, wide.mT
        results: dict[str, Callable[[], Tensor]] = {
            "other readers": lambda: cast(other, dtype=low).sin() + other.sum(),
            "arithmetic": lambda: cast(wide + 1, dtype=low),
            "another low dtype": lambda: cast(other, dtype=torch.float16),
            "one of two": lambda: cast(torch.cat([wide, wide.exp()]), dtype=low),
        }
        return results[self.kind]()


def test_a_dtype_without_kernels() -> None:
    x = torch.randn(2, 2, 4, 4, dtype=torch.bfloat16)
    gm = exported(Selects(["relu"], is_read=False, is_narrowed=True), x)
    assert not ReuseCasts((torch.bfloat16,)).call(gm).modified
    assert ReuseCasts((torch.float16,)).call(gm).modified


@pytest.mark.parametrize("kind", ["other readers", "arithmetic", "another low dtype", "one of two"])
def test_non_matches_are_untouched(kind: str) -> None:
    gm = exported(Kept(kind), torch.randn(4, 4, dtype=torch.bfloat16))
    before = graph_text(gm)
    assert not ReuseCasts().call(gm).modified
    assert graph_text(gm) == before
