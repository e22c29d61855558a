"""Overrides by op, module and argument: exactly the ops that they mean, and the numbers."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import CastPolicy, Policy, preset
from amp_fx.errors import PolicyError, PolicyWarning
from amp_fx.policies.policy import as_policy
from tests.policies.nets import WIDTH, Attention, Block, Decoder, Scores, in_float32
from tests.programs import Decided, compiled, decisions_of

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32
aten = torch.ops.aten
DEFAULT = Policy.default()


@pytest.fixture
def net() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=rng)


def flipped(net: nn.Module, x: torch.Tensor, policy: Policy) -> set[tuple[str, str, str, str]]:
    """Returns decisions that differ from the default policy's: op, module, policy, origin."""
    before = {*decisions_of(net, x, policy=DEFAULT)}
    torch._dynamo.reset()
    after = {*decisions_of(net, x, policy=policy)} - before
    return {(d.op.removeprefix("aten::"), d.path, d.policy, d.origin) for d in after}


def outputs_and_grads(
    call: Callable[..., Any], net: nn.Module, x: torch.Tensor, region: Any = None
) -> list[Any]:
    """A forward in a region, by default none, and a backward outside of it."""
    net.zero_grad()
    with region or contextlib.nullcontext():
        out = call(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in net.parameters())]


WAYS = ("bare", "ambient", "region", "compile")


def run(way: str, net: nn.Module, x: torch.Tensor, policy: Policy) -> list[Any]:
    """A model under a policy, in each of the ways in."""
    if way == "compile":
        fast = amp_fx.compile(net, policy=policy, options={"compiler": "eager"})
        return outputs_and_grads(fast, net, x)
    if way == "region":
        return outputs_and_grads(compiled(net), net, x, amp_fx.autocast("cpu", policy=policy))
    if way == "ambient":
        return outputs_and_grads(compiled(net, policy=policy), net, x, torch.autocast("cpu"))
    return outputs_and_grads(compiled(net, policy=policy, output_dtype="autocast"), net, x)


def assert_equal_bits(actual: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# By op.


def test_an_op_is_flipped_in_all_its_places_and_no_other(net: Decoder, x: torch.Tensor) -> None:
    policy = DEFAULT.with_ops({"aten::matmul": "fp32"})
    places = [f"blocks.{i}.attn{part}" for i in range(2) for part in ("", ".scores")]
    assert flipped(net, x, policy) == {
        ("matmul", place, "fp32", "op 'aten::matmul'") for place in places
    }


@pytest.mark.parametrize("name", ["softmax", "aten::softmax", "aten::softmax.int", "sof*ax"])
def test_names_of_ops(name: str) -> None:
    policy = DEFAULT.with_ops({name: "lower_precision_fp"})
    for device in ("cpu", "cuda"):
        assert policy.rule(aten.softmax.int, device) is CastPolicy.LOWER_PRECISION_FP
    assert policy.rule(aten.log_softmax.int, "cuda") is CastPolicy.FP32_SET_OPT_DTYPE
    assert DEFAULT.rule(aten.softmax.int, "cpu") is None


def test_a_name_wins_over_a_glob_and_later_over_earlier() -> None:
    policy = DEFAULT.with_ops({"mm": CastPolicy.FP32, "*mm": "keep"})
    assert policy.rule(aten.mm.default, "cpu") is CastPolicy.FP32
    assert policy.rule(aten.bmm.default, "cpu") is CastPolicy.KEEP
    policy = policy.with_ops({"*mm": "promote"})
    assert policy.rule(aten.mm.default, "cpu") is CastPolicy.PROMOTE


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_an_op(way: str, net: Decoder, x: torch.Tensor) -> None:
    policy = DEFAULT.with_ops({"linear": "fp32", "matmul": "keep"})
    expected = outputs_and_grads(net, net, x)
    assert_equal_bits(run(way, net, x, policy), expected)


# By module.


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "pattern",
    ["blocks.1.attn", "*.1.attn", re.compile(r"blocks\.1\.a\w+"), r"re:.*1\.attn"],
    ids=str,
)
def test_a_module_is_flipped_whole_and_no_other(
    pattern: Any, net: Decoder, x: torch.Tensor
) -> None:
    policy = DEFAULT.with_modules({pattern: "fp32"})
    origin = f"module {policy.modules[0].text!r}"
    assert flipped(net, x, policy) == {
        ("linear", "blocks.1.attn.qkv", "fp32", origin),
        ("matmul", "blocks.1.attn.scores", "fp32", origin),
        ("softmax.int", "blocks.1.attn.scores", "fp32", origin),
        ("matmul", "blocks.1.attn", "fp32", origin),
    }


def test_a_class_means_its_subclasses(net: Decoder, x: torch.Tensor) -> None:
    class Special(Scores):
        pass

    net.blocks[0].attn.scores = Special()  # type: ignore[union-attr]
    policy = DEFAULT.with_modules({Special: "keep"})
    assert {d[1] for d in flipped(net, x, policy)} == {"blocks.0.attn.scores"}
    torch._dynamo.reset()
    policy = DEFAULT.with_modules({Scores: "keep"})
    assert {d[1] for d in flipped(net, x, policy)} == {f"blocks.{i}.attn.scores" for i in (0, 1)}


SCORES = {
    "a module": DEFAULT.with_modules({"blocks.*.attn.scores": "fp32"}),
    "an op inside of a module": DEFAULT.with_modules({"blocks.*.attn.scores": {"matmul": "fp32"}}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCORES)
def test_numbers_of_scores_in_float32(name: str, way: str, net: Decoder, x: torch.Tensor) -> None:
    """Computes scores in float32 in a bfloat16 model; the softmax reads the product's result."""
    actual = run(way, net, x, SCORES[name])
    for module in net.modules():
        if isinstance(module, Scores):
            in_float32(module)
    assert_equal_bits(actual, outputs_and_grads(net, net, x, torch.autocast("cpu")))


def test_an_op_inside_of_a_module_is_flipped_and_no_other(net: Decoder, x: torch.Tensor) -> None:
    policy = DEFAULT.with_modules({"blocks.1": {"matmul": "fp32"}})
    origin = "module 'blocks.1', op 'matmul'"
    assert flipped(net, x, policy) == {
        ("matmul", "blocks.1.attn.scores", "fp32", origin),
        ("matmul", "blocks.1.attn", "fp32", origin),
    }


def test_later_beats_earlier_for_single_ops_too(net: Decoder, x: torch.Tensor) -> None:
    both = DEFAULT.with_modules({"head": {"linear": "fp32"}, "*": {"matmul": "keep"}})
    assert winner(net, x, both).policy == "fp32"
    assert winner(net, x, both.with_modules({"*": "keep"})).policy == "keep"
    assert winner(net, x, DEFAULT.with_modules({"*": "keep"})).policy == "keep"
    last = DEFAULT.with_modules({"*": "keep"}).with_modules({"head": {"linear": "fp32"}})
    assert winner(net, x, last).policy == "fp32"


def test_views_writes_and_explicit_dtypes_stay(x: torch.Tensor) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = x.bfloat16()
            first = low[0]
            first.zero_()
            return torch.cat([low.flatten(), low.sum(dtype=torch.bfloat16)[None]])

    policy = DEFAULT.with_modules({"*": "fp32"}).with_ops({"cat": "keep"})
    expected = Net()(x)
    result = compiled(Net(), policy=policy)(x)
    assert result[:32].count_nonzero() == 0, "the write went through the view"
    torch.testing.assert_close(result.bfloat16(), expected, rtol=0, atol=0)


def test_running_statistics_are_never_cast(x: torch.Tensor) -> None:
    """A cast copy would be written to in place of the buffer."""
    net, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    policy = DEFAULT.with_modules({"*": "lower_precision_fp"})
    compiled(net, policy=policy)(x)
    twin(x.bfloat16())
    torch.testing.assert_close(net.running_mean, twin.running_mean, rtol=0, atol=0)
    assert net.running_mean is not None
    assert net.running_mean.count_nonzero() == 4


# Which wins.


def winner(net: nn.Module, x: torch.Tensor, policy: Policy) -> Decided:
    torch._dynamo.reset()
    return next(
        d for d in decisions_of(net, x, policy=policy) if d.path == "head" and "linear" in d.op
    )


def test_module_beats_op_and_later_beats_earlier(net: Decoder, x: torch.Tensor) -> None:
    policy = DEFAULT.with_modules({"head": "fp32", nn.Linear: "promote"})
    decided = winner(net, x, policy.with_ops({"linear": "fp32"}))
    assert decided.origin == "module 'class:torch.nn.modules.linear.Linear'"
    assert decided.policy == "promote"
    assert winner(net, x, DEFAULT.with_ops({"linear": "fp32"})).origin == "op 'linear'"
    assert winner(net, x, DEFAULT).origin == "table"


# By argument.


def add_rows(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.index_add(x @ x, 0, index, source)


def test_an_argument_follows_another_one(rng: torch.Generator) -> None:
    x, source = torch.randn(4, 4, generator=rng), torch.randn(4, 4, generator=rng)
    index = torch.arange(4)
    policy = DEFAULT.with_args("aten::index_add", {"source": "same_as:self"})
    expected = torch.index_add((x.bfloat16() @ x.bfloat16()), 0, index, source.bfloat16())
    with amp_fx.autocast("cpu", policy=policy):
        result = compiled(add_rows)(x, index, source)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="same scalar type"):
        add_rows(x, index, source)


def test_an_argument_is_left_alone(rng: torch.Generator) -> None:
    x, weight, bias = (torch.randn(4, 4, generator=rng) for _ in range(3))
    policy = DEFAULT.with_ops({"addmm": "fp32"}).with_args("addmm", {"self": "keep"})

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias.bfloat16(), x, weight)

    [decided] = decisions_of(program, x, policy=DEFAULT.with_args("addmm", {"self": "keep"}))
    assert (decided.policy, decided.origin) == ("lower_precision_fp", "table")
    with pytest.raises(RuntimeError):
        # Float32 products cannot be added to a bfloat16 tensor that is kept.
        compiled(program, policy=policy, fallback=False)(x)


# What is checked when a policy is built.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: p.with_ops({"softmx": "fp32"}), "no op 'softmx'; similar names: aten::softmax"),
        (lambda p: p.with_ops({"softmax": "fp31"}), "did you mean 'fp32'"),
        (lambda p: p.with_ops({"softmax": "float64"}), "got 'float64'$"),
        (lambda p: p.with_ops({"softmax": "bfloat16"}), "write 'lower_precision_fp' instead"),
        (lambda p: p.with_modules({"a": torch.half}), "write 'lower_precision_fp' instead"),
        (
            lambda p: p.with_ops({"mm": "fp32", "aten::mm": "keep"}),
            "aten::mm has contradictory policies: fp32 by",
        ),
        (lambda p: p.with_ops({"relu": "fp32_set_opt_dtype"}), "no optional dtype argument"),
        (lambda p: p.with_ops({"exp": "fp32_append_dtype"}), "no equivalent overload with a dtype"),
        (lambda p: p.with_ops({"add_": "fp32"}), "writes to its inputs"),
        (lambda p: p.with_ops({"reshape": "fp32"}), "returns a view"),
        (lambda p: p.with_ops({"nothing_*": "fp32"}), "no op of torch .* matches 'nothing_.'"),
        (
            lambda p: p.with_modules({"a": "fp32_set_opt_dtype"}),
            "expected one of lower_precision_fp",
        ),
        (lambda p: p.with_modules({3: "fp32"}), "module 3: expected a glob"),
        (lambda p: p.with_modules({"a": {"matmull": "fp32"}}), "no op 'matmull'; similar names"),
        (lambda p: p.with_modules({"a": {"mm": "fp31"}}), "module 'a', op 'mm': expected .*'fp31'"),
        (lambda p: p.with_modules({"a": {"view": "fp32"}}), "to public ops that return new"),
        (lambda p: p.with_modules({int: "fp32"}), "expected a subclass of torch.nn.Module"),
        (lambda p: p.with_modules({"re:(": "fp32"}), "is not a regular expression"),
        (
            lambda p: p.with_args("index_add", {"sorce": "fp32"}),
            "arguments self, index, source, got 'sorce'",
        ),
        (
            lambda p: p.with_args("index_add", {"source": "same_as:x"}),
            "expected same_as: and one of",
        ),
        (lambda p: p.with_args("index_add", {"source": "promote"}), "or write same_as:<another"),
        (lambda p: p.with_ops("softmax"), "with_ops expected a mapping .*, got 'softmax'"),
        (lambda p: p.with_modules("norm"), "with_modules expected a mapping .*, got 'norm'"),
        (lambda p: p.with_args("linear", "fp32"), "with_args expected a mapping .*, got 'fp32'"),
        (lambda p: p.with_device("npu", "fp32"), "with_device expected a mapping .*, got 'fp32'"),
        (lambda p: p.with_device(3), "expected a device type like 'cuda', got 3"),
        (
            lambda p: p.with_ops({"_grouped_mm": "lower_precision_wide"}),
            "does not support this policy; the supported products are",
        ),
        (
            lambda p: p.with_ops({"softmax": "lower_precision_wide"}),
            "the supported products are aten::linear, aten::matmul",
        ),
        (lambda p: p.with_ops({"conv2d": "lower_precision_wide"}), "does not support this policy"),
        (lambda p: p.with_dtype(torch.float64), "expected dtype to be torch.bfloat16 or"),
        (lambda _: Policy.default("gpu"), "expected device_type .*, got 'gpu'"),
        (lambda _: as_policy(3), "to be an amp_fx.Policy, the name of a preset"),
    ],
)
def test_mistakes_are_told(build: Callable[[Policy], object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        build(DEFAULT)


@pytest.mark.parametrize("value", ["float32", "torch.float32", "float", torch.float32])
def test_float32_is_a_name_of_its_cast_policy(value: Any) -> None:
    """Accepts the name wherever a policy is given; files contain ATen's name."""
    changed = DEFAULT.with_ops({"softmax": value}).with_modules({"a": value, "b": {"mm": value}})
    changed = changed.with_args("index_add", {"source": value})
    expected = DEFAULT.with_ops({"softmax": "fp32"}).with_modules(
        {"a": "fp32", "b": {"mm": "fp32"}}
    )
    assert changed == expected.with_args("index_add", {"source": "fp32"})
    assert "float32" not in str(changed)


def test_a_pattern_that_fits_no_module_is_warned_of(net: Decoder, x: torch.Tensor) -> None:
    policy = DEFAULT.with_modules({"blocks.*.attention": "fp32", Block: "keep"})
    with pytest.warns(
        PolicyWarning, match=r"no module of Decoder matches 'blocks.\*.attention'.*attn"
    ):
        compiled(net, policy=policy)(x)


# Copies, equality, pickles.


def everything() -> Policy:
    policy = Policy.default("cuda", torch.float16).with_ops({"softmax": "keep", "*mm": "fp32"})
    policy = policy.with_modules({"a.*": "fp32", Attention: "keep", re.compile("b+"): "promote"})
    policy = policy.with_modules({"c": {"mm": "fp32", "exp": "keep"}})
    return policy.with_args("cat", {"tensors": "fp32"})


def test_methods_give_copies() -> None:
    before = hash(DEFAULT)
    assert everything() != DEFAULT
    assert hash(DEFAULT) == before
    assert Policy.default() == preset("torch") == DEFAULT


def test_content_makes_equal() -> None:
    assert everything() == everything()
    assert hash(everything()) == hash(everything())
    assert pickle.loads(pickle.dumps(everything())) == everything()
    assert copy.deepcopy(everything()) == everything()
    assert len({everything(), everything().with_ops({"exp": "fp32"}), DEFAULT}) == 3


def test_the_dtype_of_a_policy_is_that_of_its_regions(x: torch.Tensor) -> None:
    policy = Policy.default("cpu", torch.float16)
    net = nn.Linear(WIDTH, WIDTH)
    options: dict[str, Any] = {"policy": policy, "output_dtype": "autocast"}
    assert compiled(net, **options)(x).dtype == torch.float16
    assert compiled(net, dtype=bf16, **options)(x).dtype == bf16
    with amp_fx.autocast("cpu", policy=policy):
        assert compiled(net)(x).dtype == torch.float16


def test_changing_a_policy_recompiles_once(net: Decoder, x: torch.Tensor) -> None:
    counter = torch._dynamo.utils.counters["stats"]
    policies = [DEFAULT.with_modules({"head": p}) for p in ("fp32", "promote", "fp32")]
    counter.clear()
    for policy in policies * 2:
        fast = amp_fx.compile(net, policy=policy, options={"compiler": "eager"})
        fast(x)
    assert counter["unique_graphs"] == 2


def test_ops_are_named_by_themselves_too() -> None:
    softmax, bmm = torch.ops.aten.softmax, torch.ops.aten.bmm
    by_name = DEFAULT.with_ops({"aten::softmax.int": "fp32", "bmm": "fp32"})
    assert DEFAULT.with_ops({softmax.int: "fp32", bmm: "fp32"}).tables == by_name.tables
    index_add = torch.ops.aten.index_add
    args = {"source": "same_as:self"}
    assert (
        DEFAULT.with_args(index_add, args).args == DEFAULT.with_args("aten::index_add", args).args
    )
