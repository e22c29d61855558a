"""The emulation of CUDA's list writes: torch's own numbers, and no trace on the storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.weights.cuda_like import cuda_like, list_writes
from tests.weights.nets import assert_same, random

is_armed = torch._C._is_cow_tensor  # type: ignore[attr-defined]


def armed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, whose storage a pointer to write to would disarm."""
    torch._lazy_clone(tensor.detach())
    assert is_armed(tensor)
    return tensor


def schema_of(name: str) -> Any:
    base, _, overload = name.partition(".")
    return torch._C._get_schema(base, overload)


def arguments(name: str) -> tuple[list[Any], dict[str, Any]]:
    """Positive numbers for whatever an op's schema asks for."""
    positional, named = [], {}
    for i, argument in enumerate(schema_of(name).arguments):
        if argument.has_default_value():
            continue
        if argument.kwarg_only:
            named[argument.name] = value_for(argument, i)
        else:
            positional.append(value_for(argument, i))
    return positional, named


def value_for(argument: Any, seed: int) -> Any:
    """Returns a value for an argument of an op."""
    flat = random(40, seed=seed).abs() + 0.1
    special = {
        "state_steps": [torch.ones(()), torch.ones(())],
        "max_exp_avg_sqs": [],  # the op insists, without amsgrad
        "scalars": torch.tensor([0.5, 0.25]),
    }
    by_type = {
        "List[Tensor]": [flat[3:19].view(4, 4), flat[20:].view(4, 5).t()],
        "List[number]": [0.5, 0.25],
        "Tensor": torch.tensor(0.5),
        "number": 0.5,
        "float": 0.5,
        "bool": False,
    }
    kind = str(argument.type)
    if argument.name in special and "number" not in kind:
        return special[argument.name]
    return by_type[kind]


def call(name: str) -> list[list[torch.Tensor]]:
    """Calls an op on armed lists and gives the lists."""
    positional, named = arguments(name)
    lists = [v for v in positional if isinstance(v, list) and isinstance((*v, 0)[0], torch.Tensor)]
    for tensor in (tensor for tensors in lists for tensor in tensors):
        armed(tensor)
    base, _, overload = name.removeprefix("aten::").partition(".")
    getattr(getattr(torch.ops.aten, base), overload or "default")(*positional, **named)
    return lists


@pytest.mark.parametrize("name", list_writes())
def test_every_op_writes_what_it_always_writes(name: str) -> None:
    expected = call(name)
    with cuda_like():
        actual = call(name)
    assert_same(actual, expected)
    assert all(is_armed(tensor) for tensor in actual[0])
    assert not any(is_armed(tensor) for tensor in expected[0])
    assert all(tensor._version == 0 for tensor in actual[0])


def test_it_is_undone_at_the_end() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    with cuda_like(), pytest.raises(ZeroDivisionError):
        _ = 1 / 0
    armed(parameter)
    torch._foreach_mul_([parameter.data], 2.0)
    assert not is_armed(parameter)
