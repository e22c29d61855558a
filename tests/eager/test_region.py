"""Regions in eager and compiled code, with and without a policy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import amp_fx
from amp_fx import CastPolicy, Policy, preset
from amp_fx.errors import ArgumentTypeError, PolicyError, PolicyWarning, RegionError
from amp_fx.graphs.policy_mode import ambient_policy
from amp_fx.regions.state import AutocastState
from tests.programs import assert_same_bits, compiled, run_program

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


def with_ops(device_type: str = "cpu", **ops: CastPolicy | None) -> Policy:
    """Returns the default policy with other treatment of ATen ops; None takes an op out."""
    table = dict(preset("torch").tables[device_type])
    for name, rule in ops.items():
        qualified = f"aten::{name.replace('__', '.')}"
        if rule is None:
            del table[qualified]
        else:
            table[qualified] = rule
    return preset("torch").with_device(device_type, table)


@pytest.fixture
def mine() -> Policy:
    return with_ops(
        linear=CastPolicy.FP32,
        softmax__int=CastPolicy.LOWER_PRECISION_FP,
        mul__Tensor=CastPolicy.LOWER_PRECISION_FP,
        matmul=None,
        mm=None,
    )


@pytest.fixture
def args(rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Input, weight."""
    made = [torch.randn(4, 4, generator=rng) for _ in range(2)]
    return tuple(t.requires_grad_() for t in made)


def program(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = nn.functional.linear(x, weight)
    return y, y.softmax(-1), x * weight, x @ weight, torch.einsum("ij,jk->ik", x, weight)


def dtypes(outputs: Any) -> list[torch.dtype]:
    return [output.dtype for output in outputs]


MINE = [f32, bf16, bf16, f32, bf16]  # inside of einsum, bmm is low
TORCH = [bf16, bf16, f32, bf16, bf16]


# Without a policy.


def test_same_as_torch_autocast(args: tuple[torch.Tensor, ...]) -> None:
    with torch.autocast("cpu", f16, cache_enabled=False):
        expected, state = program(*args), AutocastState.ambient()
    with amp_fx.autocast("cpu", f16, cache_enabled=False):
        actual = program(*args)
        assert AutocastState.ambient() == state
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_nesting() -> None:
    before = AutocastState.ambient()
    with amp_fx.autocast("cpu", f16):
        outer = AutocastState.ambient()
        with amp_fx.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", bf16):
                assert torch.get_autocast_dtype("cpu") == bf16
        assert AutocastState.ambient() == outer
    assert AutocastState.ambient() == before


@pytest.mark.parametrize("has_policy", [False, True])
def test_entered_again_while_active(has_policy: bool, mine: Policy) -> None:
    before = AutocastState.ambient()
    region = amp_fx.autocast("cpu", policy=mine if has_policy else None)
    with region, region:
        assert torch.is_autocast_enabled("cpu")
    assert AutocastState.ambient() == before

    @region
    def recursive(depth: int) -> bool:
        return recursive(depth - 1) if depth else torch.is_autocast_enabled("cpu")

    assert recursive(3)
    assert AutocastState.ambient() == before


@pytest.mark.parametrize("has_policy", [False, True])
def test_state_is_restored_after_an_exception(has_policy: bool, mine: Policy) -> None:
    before = AutocastState.ambient()
    with (
        pytest.raises(KeyError, match="of the user"),
        amp_fx.autocast("cpu", policy=mine if has_policy else None),
    ):
        raise KeyError("of the user")
    assert AutocastState.ambient() == before


@pytest.mark.parametrize("has_policy", [False, True])
def test_left_out_of_order(has_policy: bool, mine: Policy) -> None:
    before = AutocastState.ambient()
    policy = mine if has_policy else None
    outer, inner = amp_fx.autocast("cpu", f16, policy=policy), amp_fx.autocast("cpu", bf16)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RegionError, match="before the 1 region"):
        outer.__exit__(None, None, None)
    assert AutocastState.ambient() == before
    with pytest.raises(RegionError, match="has not entered it"):
        inner.__exit__(None, None, None)
    assert AutocastState.ambient() == before
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_left_in_another_thread() -> None:
    region = amp_fx.autocast("cpu")
    with region, pytest.raises(RegionError):
        in_a_thread(lambda: region.__exit__(None, None, None))


@pytest.mark.parametrize("device_type", ["nowhere", "cpu:0", "", None, 3, "ipu", "meta"])
def test_device_type_that_cannot_autocast(device_type: Any) -> None:
    before = AutocastState.ambient()
    with pytest.raises(RegionError, match=r"cannot autocast; use .*'cpu'"):
        amp_fx.autocast(device_type)
    assert AutocastState.ambient() == before


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_unknown_argument_is_told_with_the_nearest_name(is_compiled: bool) -> None:
    def program() -> Any:
        with amp_fx.autocast("cpu", polcy="lean"):  # type: ignore[arg-type]
            return torch.ones(2)

    call = torch.compile(program, backend="eager") if is_compiled else program
    with pytest.raises(Exception, match="no argument 'polcy'; did you mean 'policy'") as raised:
        call()
    assert is_compiled or isinstance(raised.value, ArgumentTypeError)
    with pytest.raises(TypeError, match=r"no argument 'nonsense'$"):
        amp_fx.autocast("cpu", nonsense=1)  # type: ignore[arg-type]


def test_unsupported_dtype_warns_and_disables_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="not supported") as theirs:
        torch.autocast("cpu", f32)
    with pytest.warns(UserWarning, match="not supported") as ours:
        region = amp_fx.autocast("cpu", f32)
    assert [str(w.message) for w in ours] == [str(w.message) for w in theirs]
    with region:
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("policy", [3, {"aten::mm": CastPolicy.FP32}, "no preset"])
def test_policy_of_the_wrong_type(policy: Any) -> None:
    with pytest.raises(PolicyError, match="preset"):
        amp_fx.autocast("cpu", policy=policy)


def test_decorating_no_function(mine: Policy) -> None:
    for policy in (None, mine):
        with pytest.raises(TypeError, match=r"callable|functions"):
            amp_fx.autocast("cpu", policy=policy)(3)  # type: ignore[type-var]


# With a policy.


def test_eager_code_follows_torch_autocast_and_warns_once(
    args: tuple[torch.Tensor, ...], mine: Policy
) -> None:
    call = compiled(program)
    with amp_fx.autocast("cpu", policy=mine):
        assert ambient_policy() == mine
        assert dtypes(call(*args)) == MINE
        with pytest.warns(PolicyWarning, match=r"'program' \(.*test_region.py:\d+\) runs eagerly"):
            assert dtypes(program(*args)) == TORCH
        assert dtypes(program(*args)) == TORCH  # warns no more
    assert ambient_policy() is None
    assert dtypes(program(*args)) == [f32] * 5


def test_ops_that_a_policy_leaves_alone_do_not_warn(args: tuple[torch.Tensor, ...]) -> None:
    with amp_fx.autocast("cpu", policy=with_ops(linear=CastPolicy.FP32)):
        assert (args[0] @ args[1]).dtype == bf16
        assert nn.functional.mse_loss(args[0], args[1]).dtype == f32


def test_regions_inside_one_with_a_policy(args: tuple[torch.Tensor, ...], mine: Policy) -> None:
    call = compiled(program)
    with amp_fx.autocast("cpu", policy=mine):
        with torch.autocast("cpu", f16):
            assert dtypes(call(*args)) == [f32, f16, f16, f32, f16]
        with amp_fx.autocast("cpu"):
            assert dtypes(call(*args)) == MINE
        with torch.autocast("cpu", enabled=False):
            assert dtypes(call(*args)) == [f32] * 5
        with amp_fx.autocast("cpu", policy="torch"):
            assert dtypes(call(*args)) == TORCH
        assert dtypes(call(*args)) == MINE


def test_policy_of_another_device_changes_nothing(args: tuple[torch.Tensor, ...]) -> None:
    policy = with_ops("cuda", linear=CastPolicy.FP32)
    with amp_fx.autocast("cpu", policy=policy):
        assert dtypes(compiled(program)(*args)) == TORCH


def test_gradients_are_those_of_casts_by_hand(args: tuple[torch.Tensor, ...]) -> None:
    policy = with_ops(add__Tensor=CastPolicy.FP32, linear=CastPolicy.LOWER_PRECISION_FP)

    def wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight) + nn.functional.linear(weight, x)

    def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        one = nn.functional.linear(x, weight)
        return one.float() + nn.functional.linear(weight, x).float()

    ours = amp_fx.autocast("cpu", policy=policy)(compiled(wide))
    assert_same_bits(run_program(ours, args), run_program(by_hand, args, bf16))


def test_policy_is_that_of_the_thread(args: tuple[torch.Tensor, ...], mine: Policy) -> None:
    def run() -> list[torch.dtype]:
        with torch.autocast("cpu"):
            return dtypes(compiled(program)(*args))

    with amp_fx.autocast("cpu", policy=mine):
        assert in_a_thread(run) == TORCH


# Compiled.


def constructed(policy: Policy | None) -> Callable[..., Any]:
    def call(*args: torch.Tensor) -> Any:
        with amp_fx.autocast("cpu", bf16, policy=policy):
            return program(*args)

    return call


def decorated(policy: Policy | None) -> Callable[..., Any]:
    return amp_fx.autocast("cpu", bf16, policy=policy)(program)


@pytest.mark.parametrize("way", [constructed, decorated])
@pytest.mark.parametrize("has_policy", [False, True])
def test_region_in_one_graph(
    way: Callable[..., Any], has_policy: bool, args: tuple[torch.Tensor, ...], mine: Policy
) -> None:
    call = way(mine if has_policy else None)
    whole = torch.compile(call, backend="amp_fx", options={"compiler": "eager"}, fullgraph=True)
    ours = run_program(whole, args)
    assert dtypes(ours.outputs) == (MINE if has_policy else TORCH)
    expected = compiled(program, policy=mine) if has_policy else program
    assert_same_bits(ours, run_program(expected, args, bf16))


def test_region_made_outside_of_the_graph(args: tuple[torch.Tensor, ...]) -> None:
    region = amp_fx.autocast("cpu", bf16)

    def call(*args: torch.Tensor) -> Any:
        with region:
            return program(*args)

    assert dtypes(torch.compile(call, backend="amp_fx", fullgraph=True)(*args)) == TORCH


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
def test_policy_region_with_a_break_inside(args: tuple[torch.Tensor, ...], mine: Policy) -> None:
    region = amp_fx.autocast("cpu", policy=mine)

    def inside(x: torch.Tensor, weight: torch.Tensor) -> Any:
        first = program(x, weight)
        torch._dynamo.graph_break()
        return first + program(weight, x)

    def call(x: torch.Tensor, weight: torch.Tensor) -> Any:
        with region:
            return inside(x, weight)

    ours = run_program(compiled(call), args)
    assert dtypes(ours.outputs) == MINE * 2
    assert_same_bits(ours, run_program(compiled(inside, policy=mine), args, bf16))


def test_policy_around_the_call_recompiles_once(
    args: tuple[torch.Tensor, ...], mine: Policy
) -> None:
    call, before = compiled(program), counters["stats"]["unique_graphs"]
    for policy, expected in ((mine, MINE), (None, TORCH)) * 2:
        with amp_fx.autocast("cpu", policy=policy):
            assert dtypes(call(*args)) == expected
    assert counters["stats"]["unique_graphs"] == before + 2


def test_an_opaque_node_follows_torch_autocast(args: tuple[torch.Tensor, ...]) -> None:
    policy = with_ops(mul__Tensor=CastPolicy.LOWER_PRECISION_FP)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.vmap(lambda row: row * weight[0])(x)
        return result

    with torch.autocast("cpu", bf16):
        expected = call(*args)
        with pytest.warns(PolicyWarning, match=r"\(.*test_region.py:.* does not reach inside"):
            found = compiled(call, policy=policy)(*args)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype == f32
