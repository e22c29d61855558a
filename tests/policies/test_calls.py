"""rules: ATen's own autocast kernels are the oracle, on CPU tensors and fake CUDA tensors.

A call is made twice: under native autocast, and as ``apply_policy`` rewrites it with autocast
off. Both must reach the kernels below autocast alike: the same ops with the same dtypes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.graphs.values import tensors_in
from amp_fx.policies.calls import apply_policy, is_eligible, qualified_name, reaches_autocast
from amp_fx.policies.policy import preset
from amp_fx.regions.state import AutocastState, no_autocast
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.policies.calls import Call

    Arrivals = list[tuple[str, list[torch.dtype]]]

aten: Any = torch.ops.aten
bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = (bf16, f16)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down which ops arrive with which dtypes, whether or not they then fail."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arrivals: Arrivals = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        dtypes = [tensor.dtype for tensor in tensors_in(args, kwargs)]
        dtypes += [value for value in kwargs.values() if isinstance(value, torch.dtype)]
        self.arrivals.append((str(func), dtypes))
        return func(*args, **kwargs)


def arrivals(call: Call, around: contextlib.AbstractContextManager[Any]) -> tuple[Arrivals, str]:
    """Returns the ops that arrive below autocast, and the error message, if any."""
    op, args, kwargs = call
    error = ""
    with around, Recorder() as recorder:
        try:
            op(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as raised:
            error = str(raised)
    return recorder.arrivals, error


def native_region(device_type: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Autocast without its cache; of CUDA, too, where there is none."""
    return AutocastState.ambient().turned(device_type, enabled=True, dtype=dtype).applied()


@contextlib.contextmanager
def on_device(device_type: str) -> Iterator[Callable[[torch.dtype], torch.Tensor]]:
    """A maker of 2x2 tensors: real ones on CPU, fake ones on CUDA."""
    fake = FakeTensorMode() if device_type == "cuda" else contextlib.nullcontext()
    with fake:
        yield lambda dtype: torch.ones(2, 2, device=device_type).to(dtype)


def rewritten(call: Call, device_type: str, dtype: torch.dtype) -> Call:
    policy = preset("torch").rule(call[0], device_type)
    assert policy is not None, f"{qualified_name(call[0])} has no policy on {device_type}"
    with no_autocast():
        return apply_policy(policy, call, device_type, dtype)


# How to call an op with tensors: optional, list and constant arguments among them. Indexing a
# fake CUDA tensor wants a device guard that a CPU build lacks; ``select`` does not.
CALLS: dict[Any, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.mm.default: lambda a, b, _: ((a, b), {}),
    aten.matmul.default: lambda a, b, _: ((a, b), {}),
    aten.linear.default: lambda a, b, c: ((a, b, c.select(0, 0)), {}),
    aten.addmm.default: lambda a, b, c: ((a, b, c), {"alpha": 2}),
    aten.scaled_dot_product_attention.default: lambda a, b, c: (
        (a.unsqueeze(0), b.unsqueeze(0), c.unsqueeze(0)),
        {"attn_mask": None},
    ),
    aten.mse_loss.default: lambda a, b, _: ((a, b), {}),
    aten.binary_cross_entropy_with_logits.default: lambda a, b, c: ((a, b, None, c), {}),
    aten.cdist.default: lambda a, b, _: ((a, b), {}),
    aten.cat.default: lambda a, b, c: (([a, b, c], 1), {}),
    aten.stack.default: lambda a, b, c: (([a, b, c],), {}),
    aten.softmax.int: lambda a, *_: ((a, 1), {}),
    aten.sum.dim_IntList: lambda a, *_: ((a, [0]), {}),
    aten.cumsum.default: lambda a, *_: ((a, 0), {}),
    aten.prod.default: lambda a, *_: ((a,), {}),
    aten.norm.Scalar: lambda a, *_: ((a,), {}),
    aten.norm.ScalarOpt_dim: lambda a, *_: ((a, 2, [0]), {"keepdim": True}),
    aten.layer_norm.default: lambda a, b, _: ((a, [2], b.select(0, 0)), {}),
    aten.addcdiv.default: lambda a, b, c: ((a, b, c), {}),
    aten.atan2.default: lambda a, b, _: ((a, b), {}),
    aten.bilinear.default: lambda a, b, c: ((a, b, b.expand(2, 2, 2), c.select(0, 0)), {}),
    aten.dot.default: lambda a, b, _: ((a.select(0, 0), b.select(0, 0)), {}),
    aten.pow.Tensor_Tensor: lambda a, b, _: ((a, b), {}),
}
LISTED = [
    (device_type, op)
    for device_type in ("cpu", "cuda")
    for op in CALLS
    if preset("torch").rule(op, device_type) is not None
]
DTYPES = (bf16, f16, f32, f64, torch.int64, torch.bool, torch.complex64)


def test_every_policy_is_met_on_some_device() -> None:
    met = {preset("torch").rule(op, device_type) for device_type, op in LISTED}
    amp_fx_own = {
        CastPolicy.KEEP,
        CastPolicy.SAME_AS_INPUT,
        CastPolicy.LOWER_PRECISION_IO,
        CastPolicy.DEMOTE,
        CastPolicy.FLOAT8,
        CastPolicy.LOWER_PRECISION_WIDE,
    }
    assert met == set(CastPolicy) - {CastPolicy.BANNED} - amp_fx_own


# A float32 bias does not promote low inputs, because it may be None.
@example(listed=("cuda", aten.bilinear.default), low_dtype=bf16, dtypes=(bf16, bf16, f32))
@settings(max_examples=300, deadline=None)
@given(
    listed=st.sampled_from(LISTED),
    low_dtype=st.sampled_from(LOW),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
)
def test_the_same_dtypes_arrive_as_under_native_autocast(
    listed: tuple[str, Any], low_dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    device_type, op = listed
    with on_device(device_type) as make:
        call = (op, *CALLS[op](*map(make, dtypes)))
        expected, error = arrivals(call, native_region(device_type, low_dtype))
        ours, our_error = arrivals(
            rewritten_with_casts(call, device_type, low_dtype), no_autocast()
        )
    if "Unexpected floating ScalarType" in error:
        assert_float32_arrives(ours, our_error)
        return
    assert in_any_cast_order(ours) == in_any_cast_order(expected)
    assert bool(our_error) == bool(error)


def rewritten_with_casts(call: Call, device_type: str, dtype: torch.dtype) -> Call:
    """Returns a call that makes its casts inside, where the recorder sees them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        op, new_args, new_kwargs = rewritten((call[0], args, kwargs), device_type, dtype)
        return op(*new_args, **new_kwargs)

    return run, call[1], call[2]  # type: ignore[return-value]


def in_any_cast_order(found: Arrivals) -> tuple[list[str], Arrivals]:
    """Returns the casts, and the rest: C++ leaves open in which order arguments are cast."""
    casts = [arrival for arrival in found if arrival[0] == "aten._to_copy.default"]
    return sorted(map(str, casts)), [arrival for arrival in found if arrival not in casts]


def assert_float32_arrives(ours: Arrivals, our_error: str) -> None:
    """ATen refuses a third reduced type; ours goes to float32, which holds both."""
    _, kernels = in_any_cast_order(ours)
    assert kernels or our_error
    assert all(f32 in dtypes and not set(LOW) & set(dtypes) for _, dtypes in kernels)


PROMOTED = [("cpu", aten.cat.default), ("cuda", aten.atan2.default)]


@pytest.mark.parametrize(("device_type", "op"), PROMOTED)
def test_third_reduced_type_is_promoted_to_float32(device_type: str, op: Any) -> None:
    with on_device(device_type) as make:
        tensors = [make(f16), make(f16)]
        call: Call = (op, (tensors,) if op is aten.cat.default else tuple(tensors), {})
        _, error = arrivals(call, native_region(device_type, bf16))
        assert "Unexpected floating ScalarType" in error
        _, args, _ = rewritten(call, device_type, bf16)
    assert [tensor.dtype for tensor in tensors_in(args)] == [f32, f32]


@pytest.mark.parametrize(
    ("args", "kwargs", "sets_dtype"),
    [
        ((1,), {}, True),
        ((1, None), {}, True),
        ((1,), {"dtype": None}, True),
        ((1, f64), {}, False),
        ((1,), {"dtype": f16}, False),
    ],
)
def test_dtype_is_set_where_none_was_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], sets_dtype: bool
) -> None:
    with on_device("cuda") as make:
        call: Call = (aten.softmax.int, (make(f16), *args), kwargs)
        expected, _ = arrivals(call, native_region("cuda", f16))
        new = rewritten(call, "cuda", f16)
        assert arrivals(new, no_autocast())[0] == expected
    assert (new is not call) == sets_dtype


def test_list_of_optional_tensors_passes_uncast() -> None:
    """The indices of ``index_put`` go through the catch-all of ``cached_cast``."""
    index = torch.tensor([0])
    call: Call = (aten.index_put.default, (torch.ones(2), [index], torch.ones(1).bfloat16()), {})
    with no_autocast():
        _, args, _ = apply_policy(CastPolicy.PROMOTE, call, "cpu", bf16)
    assert args[1][0] is index
    assert [args[0].dtype, args[2].dtype] == [f32, f32]


def test_tensors_of_other_devices_are_not_touched() -> None:
    meta = torch.ones(2, 2, device="meta")
    assert not is_eligible(meta, "cpu")
    assert not reaches_autocast((meta, [meta]), {}, "cpu")
    assert reaches_autocast(([meta, torch.ones(1)],), {}, "cpu")
    assert reaches_autocast((), {"other": torch.ones(1, dtype=torch.int64)}, "cpu")
