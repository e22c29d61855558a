"""policy_calls: eager calls that are decomposed against native autocast, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import amp_fx
from amp_fx import CastPolicy, Policy, preset
from amp_fx.graphs import policy_calls
from tests.programs import assert_same_bits, run_program

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32

AS_TORCH = Policy.default().with_modules({"no.such.module": "fp32"})
"""Treats every op as PyTorch does, and is none of PyTorch's."""


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = functional.layer_norm(functional.linear(x, weight), (8,))
    return functional.gelu(y) + x


def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q, k, v = ((x @ weight).view(1, 2, 4, 4) for _ in range(3))
    return functional.scaled_dot_product_attention(q, k, v).flatten(1)


def losses(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ weight
    target = torch.arange(4)
    return (
        functional.cross_entropy(y, target),
        functional.mse_loss(y, x),
        functional.smooth_l1_loss(y, x, beta=0.5),
    )


def composites(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.einsum("ij,jk->ik", x, weight),
        torch.cat([x @ weight, x]),
        torch.addmm(x[0], x, weight, beta=0.5).softmax(-1).log(),
        x.T.matmul(x).prod() + 2 ** (x @ weight).tanh().norm(),
        torch.stack([x, x]).bmm(torch.stack([weight, weight])).sum(0),
        functional.dropout(x @ weight, 0.5),
    )


def convolutions(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    image = functional.pad(x.view(1, 1, 4, 8), (1, 1, 1, 1), mode="circular")
    y = functional.conv2d(image, weight.view(4, 1, 4, 4)[:, :, :3, :3], padding="same")
    return functional.interpolate(functional.max_pool2d(y, 2), scale_factor=2.0, mode="bilinear")


def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x @ weight
    y += x
    y[0] = 1.0
    return y.mul_(2).clamp_(max=2) @ weight.T


PROGRAMS: list[Callable[..., Any]] = [block, attention, losses, composites, convolutions, in_place]


@pytest.fixture
def args(rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    x, weight = torch.randn(4, 8, generator=rng), torch.randn(8, 8, generator=rng)
    return x.requires_grad_(), weight.requires_grad_()


@pytest.fixture
def decomposing(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Decomposes the calls, too, that the policy treats as PyTorch does."""
    made: list[object] = []

    def never_equal(_: object) -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(policy_calls, "_effect", never_equal)
    policy_calls._calls.clear()
    return made


@pytest.mark.parametrize("program", PROGRAMS)
def test_decomposed_calls_have_the_bits_of_native_autocast(
    program: Callable[..., Any], args: tuple[torch.Tensor, ...], decomposing: list[object]
) -> None:
    def run(region: Any) -> Any:
        def seeded(*args: torch.Tensor) -> Any:
            torch.manual_seed(0)
            with region:
                return program(*args)

        return run_program(seeded, args)

    # Casts made here are not shared, as with the cache off.
    native = run(torch.autocast("cpu", bf16, cache_enabled=False))
    assert_same_bits(run(amp_fx.autocast("cpu", bf16, policy=AS_TORCH)), native)
    assert decomposing
    policy_calls._calls.clear()


@pytest.mark.usefixtures("decomposing")
@pytest.mark.parametrize(
    "layer",
    [
        "attention",
        pytest.param(
            "lstm",
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
                reason="oneDNN has no LSTM in bfloat16 here",
            ),
        ),
        "transformer",
    ],
)
def test_modules_whose_functions_are_python_or_opaque(layer: str, rng: torch.Generator) -> None:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "attention": nn.MultiheadAttention(8, 2, batch_first=True),
        "lstm": nn.LSTM(8, 8, batch_first=True),
        "transformer": nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    }
    module, x = made[layer], torch.randn(2, 4, 8, generator=rng)
    inputs = (x, x, x) if layer == "attention" else (x,)
    with torch.autocast("cpu", bf16, cache_enabled=False):
        native = module(*inputs)
    with amp_fx.autocast("cpu", bf16, policy=AS_TORCH):
        ours = module(*inputs)
    torch.testing.assert_close(ours, native, rtol=0, atol=0)
    policy_calls._calls.clear()


LOW_SUM = Policy.default().with_ops({"aten::sum": "lower_precision_fp"})


def test_the_policy_holds_inside_of_transforms(args: tuple[torch.Tensor, ...]) -> None:
    def total(row: torch.Tensor) -> torch.Tensor:
        return row.sum()

    x = args[0].detach()
    low = x.bfloat16()
    with amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        batched, gradient = torch.vmap(total)(x), torch.func.grad(total)(x)
    torch.testing.assert_close(batched, low.sum(1), rtol=0, atol=0)
    assert gradient.dtype == f32
    torch.testing.assert_close(gradient, torch.ones_like(x), rtol=0, atol=0)


def test_equal_calls_are_traced_once(
    args: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = args
    other = torch.zeros_like(x, requires_grad=True)
    with amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        (x @ weight).sum()
        monkeypatch.setattr(policy_calls, "_decompose_call", lambda *_: pytest.fail("traced again"))
        (other @ weight).sum()


def test_policies_share_the_calls_on_which_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    base = LOW_SUM
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    traced: list[Any] = []
    decompose = policy_calls._decompose_call

    def counted(*args: Any) -> Any:
        traced.append(args)
        return decompose(*args)

    monkeypatch.setattr(policy_calls, "_decompose_call", counted)

    def dtypes(policy: Policy) -> tuple[torch.dtype, ...]:
        found = []
        hooks = [m.register_forward_hook(lambda *a: found.append(a[2].dtype)) for m in model]
        with amp_fx.autocast("cpu", bf16, policy=policy):
            model(torch.ones(4, 8)).sum()
        for hook in hooks:
            hook.remove()
        return tuple(found)

    assert dtypes(base) == (bf16, bf16)
    traced.clear()
    assert dtypes(base.with_modules({"0": "fp32"})) == (f32, bf16)
    assert dtypes(base.with_modules({"1": {"linear": "fp32"}})) == (bf16, f32)
    assert len(traced) <= 4, "the wide layers, and what reads their results"


def test_a_call_under_another_state_is_another_call(args: tuple[torch.Tensor, ...]) -> None:
    x = args[0]
    with amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        assert x.sum().dtype == bf16
        with torch.autocast("cpu", torch.float16):
            assert x.sum().dtype == torch.float16
        with torch.no_grad():
            assert not x.sum().requires_grad
        assert x.sum().requires_grad


def test_hooks_and_backwards_run_as_they_are(args: tuple[torch.Tensor, ...]) -> None:
    x: Any = args[0]
    seen: list[torch.dtype] = []
    with amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        y = x * 2
        y.register_hook(lambda grad: seen.append(grad.dtype))
        y.sum().float().backward()
    assert seen == [f32]
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_and_sparse_tensors_run_natively() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.strided)
    sparse = torch.eye(3).to_sparse()
    with torch.autocast("cpu", bf16):
        expected = torch.sparse.mm(sparse, torch.eye(3)).dtype
    with amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        assert (nested * 2).unbind()[0].sum().dtype == bf16
        assert torch.sparse.mm(sparse, torch.eye(3)).dtype == expected


def test_an_op_without_a_policy_is_not_cast(args: tuple[torch.Tensor, ...]) -> None:
    table = {k: v for k, v in preset("torch").tables["cpu"].items() if k != "aten::bmm"}
    policy = preset("torch").with_device("cpu", table)
    x, weight = (arg[None] for arg in args)
    with amp_fx.autocast("cpu", bf16, policy=policy):
        product = torch.bmm(x, weight)
    assert torch.equal(product, torch.bmm(x, weight))


def test_what_is_banned_raises_each_time(args: tuple[torch.Tensor, ...]) -> None:
    table = {**preset("torch").tables["cpu"], "aten::tanh": CastPolicy.BANNED}
    policy = preset("torch").with_device("cpu", table)
    for _ in range(2):
        with (
            pytest.raises(amp_fx.errors.UnsupportedError, match="tanh is banned"),
            amp_fx.autocast("cpu", bf16, policy=policy),
        ):
            args[0].tanh()


_WIDE = {f"aten::{name}": "fp32" for name in ("topk", "sort", "max", "svd", "meshgrid")}
_EVERYTHING_WIDE = preset("torch").with_modules({"*": _WIDE})


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("topk", lambda x: x.topk(2)),
        ("sort", torch.sort),
        ("max.dim", lambda x: torch.max(x, 0)),
        ("svd", torch.svd),
        ("unbind", lambda x: x.unbind()),
        ("split.Tensor", lambda x: torch.split(x, 2)),
        ("meshgrid", lambda x: torch.meshgrid(x[0], x[1], indexing="ij")),
    ],
)
def test_results_have_the_class_that_the_call_returns(op: str, call: Any) -> None:
    x = torch.randn(4, 4)
    with amp_fx.autocast("cpu", bf16, policy=_EVERYTHING_WIDE):
        found = call(x.bfloat16())
    assert type(found) is type(call(x)), op


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_torchscript_traces_follow_native_autocast(args: tuple[torch.Tensor, ...]) -> None:
    with amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        traced = torch.jit.trace(lambda x: torch.mm(x, x.T), args[0].detach())  # type: ignore[no-untyped-call]
    assert traced(args[0].detach()[:1]).shape == (1, 1)


def test_modes_of_the_user_do_not_see_fake_tensors() -> None:
    class Refuse(TorchFunctionMode):
        def __torch_function__(self, func: Any, *_: Any) -> Any:
            args, kwargs = _[1], _[2] if len(_) > 2 else None
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                assert result.sum().item() is not None
            return result

    x = torch.randn(5, 7)
    with Refuse(), amp_fx.autocast("cpu", bf16, policy=LOW_SUM):
        assert torch.mm(x, x.T).dtype == bf16
        assert x.float().sum().dtype == bf16
