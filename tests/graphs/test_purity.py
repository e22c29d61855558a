"""purity: which nodes compute the same from the same arguments, and do nothing else."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from amp_fx.errors import PolicyError
from amp_fx.graphs import purity
from amp_fx.graphs.purity import is_pure, is_pure_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

aten, prims, own = torch.ops.aten, torch.ops.prims, torch.ops.amp_fx
w = torch.arange(12.0).reshape(3, 4)

_library = torch.library.Library("amp_fx_purity", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, kernel: Callable[..., Any], **kwargs: Any) -> Any:
    """Defines an op of a plain library."""
    _library.define(schema, **kwargs)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.amp_fx_purity, packet), overload or "default")


opaque = define("opaque(Tensor x) -> Tensor", torch.neg)
double = define("double(Tensor x) -> Tensor", lambda x: 2 * x)
turned = define("double.turned(Tensor x, bool turns) -> Tensor", lambda x, _: 2 * x.T)
write = define("write_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.neg_())
draw = define(
    "draw(Tensor x) -> Tensor", torch.rand_like, tags=(torch.Tag.nondeterministic_seeded,)
)
count = define("count(Tensor x) -> int", torch.numel)
tell = define("tell(Tensor x) -> Tensor", torch.clone)


@torch.library.custom_op("amp_fx_purity::decorated", mutates_args=())
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.fixture(autouse=True)
def _no_op_is_registered() -> Iterator[None]:
    yield
    purity._registered.clear()


def node_of(target: Any, *args: Any, op: str = "call_function", value: Any = None) -> fx.Node:
    node = fx.Graph().create_node(op, target, args)
    if value is not None:
        node.meta["val"] = value
    return node


def name_of(value: Any) -> str:
    """Returns the name of a case, without the address that Python prints for functions."""
    return str(value) if isinstance(value, str) else getattr(value, "__name__", str(value))


PURE = (
    aten.mm.default,
    aten.view.default,
    aten.index.Tensor,  # by integers: a table of relative positions
    aten.split.Tensor,
    aten.full_like.default,
    aten._native_batch_norm_legit_no_training.default,
    prims.convert_element_type.default,
    own.float8_weight.default,
    torch.ops.mkldnn._reorder_linear_weight.default,
    torch.ops.mkldnn._reorder_linear_weight,  # inductor's patterns insert the packet
    torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight.default,
    operator.getitem,
)


@pytest.mark.parametrize("target", PURE, ids=str)
def test_pure(target: Any) -> None:
    assert is_pure(node_of(target, w, value=w))


IMPURE = (
    aten.add_.Tensor,
    aten.add.out,
    aten.rand_like.default,
    aten.bernoulli.default,
    aten.native_dropout.default,
    torch.ops.prims.inductor_seed.default if hasattr(prims, "inductor_seed") else aten.rand.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    prims.empty_strided.default,
    aten.native_batch_norm.default,
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.sym_size.int,
    aten._assert_async.msg,
    aten._print.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops.higher_order.cond,
    torch.ops.higher_order.wrap,
    opaque,
    opaque.overloadpacket,
    torch.neg,
    torch.nn.functional.linear,
)


@pytest.mark.parametrize("target", IMPURE, ids=name_of)
def test_impure(target: Any) -> None:
    assert not is_pure(node_of(target, w, value=w))


@pytest.mark.parametrize("op", ["placeholder", "get_attr", "call_method", "output"])
def test_only_calls_of_functions_are_pure(op: str) -> None:
    assert not is_pure(node_of("x", op=op))


def test_a_shape_that_depends_on_data() -> None:
    index = torch.tensor([2, 0])
    mask = torch.tensor([True, False, True])

    def pure_of(function: Callable[..., Any], *args: torch.Tensor) -> bool:
        gm = make_fx(function, tracing_mode="symbolic")(*args)
        assert len(args) == len(gm.graph.find_nodes(op="placeholder"))
        return all(is_pure(n) for n in gm.graph.nodes if n.op == "call_function")

    assert pure_of(lambda w, i: w[i], w, index)
    assert not pure_of(lambda w, m: w[m], w, mask)
    assert not pure_of(torch.nonzero, mask)
    assert not is_pure(node_of(aten.index.Tensor, w, [index]))  # nobody recorded its value


class _Twice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op twice, and notes those whose results or arguments differ."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.differing: set[str] = set()
        self.num_pure = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_pure_op(func):
            return func(*args, **kwargs)
        self.num_pure += 1
        given = _bits((args, kwargs))
        first = func(*args, **kwargs)
        bits = _bits(first)
        torch.rand(3)
        second = _bits(func(*args, **kwargs))
        if not (_are_same(bits, second) and _are_same(given, _bits((args, kwargs)))):
            self.differing.add(str(func))
        return first


def _bits(values: Any) -> list[torch.Tensor]:
    tensors = [t for t in pytree.tree_leaves(values) if type(t) is torch.Tensor]
    return [t.detach().clone() for t in tensors if t.layout is torch.strided]


def _are_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.resolve_conj().nan_to_num(7.0), b.resolve_conj().nan_to_num(7.0))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.slow
def test_pure_ops_of_pytorch_give_the_same_twice() -> None:
    """Runs each op twice on its first inputs in PyTorch's list."""
    differing, num_pure = set(), 0
    for info in op_db:
        if torch.float32 not in info.dtypes:
            continue
        with contextlib.suppress(Exception), torch.no_grad():
            sample = next(iter(info.sample_inputs("cpu", torch.float32)))  # type: ignore[no-untyped-call]
            with _Twice() as twice:
                info.op(sample.input, *sample.args, **sample.kwargs)
        differing |= twice.differing
        num_pure += twice.num_pure
    assert not differing
    assert num_pure > 1000


# ------------------------------------------------------------------------------------ opting in


@pytest.mark.parametrize("op", ["amp_fx_purity::double", double, double.overloadpacket], ids=str)
def test_an_op_opts_in(op: Any) -> None:
    assert not is_pure(node_of(double, w))
    amp_fx.register_pure_op(op)
    assert is_pure(node_of(double, w))
    assert not is_pure(node_of(opaque, w))


def test_a_name_means_all_overloads_and_an_overload_itself() -> None:
    amp_fx.register_pure_op("amp_fx_purity::double.turned")
    assert [is_pure(node_of(op, w)) for op in (double, turned)] == [False, True]
    assert not is_pure(node_of(double.overloadpacket, w)), "one of its overloads is not registered"
    amp_fx.register_pure_op("amp_fx_purity::double")
    assert [is_pure(node_of(op, w)) for op in (double, turned)] == [True, True]
    assert is_pure(node_of(double.overloadpacket, w))


def test_what_custom_op_returns() -> None:
    amp_fx.register_pure_op(decorated)
    assert is_pure(node_of(torch.ops.amp_fx_purity.decorated.default, w))


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (write, "writes to its arguments"),
        (draw, "draws random numbers"),
        (count, "does not return tensors"),
        ("aten::rand_like", "draws random numbers"),
        ("aten::empty_like", "uninitialized"),
        ("amp_fx_purity::missing", "no op"),
        (torch.neg, "not an op"),
    ],
    ids=name_of,
)
def test_what_cannot_be_pure_is_refused(op: Any, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        amp_fx.register_pure_op(op)


def test_an_op_that_is_registered_as_having_effects() -> None:
    amp_fx.register_pure_op(tell)
    handle = _register_effectful_op(tell, EffectType.ORDERED)
    try:
        assert not is_pure(node_of(tell, w))
        with pytest.raises(PolicyError, match="effects"):
            amp_fx.register_pure_op(tell)
    finally:
        handle.destroy()
