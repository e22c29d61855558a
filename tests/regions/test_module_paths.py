"""module_paths: paths begin at the compiled module, however its methods are wrapped or called."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import Policy
from amp_fx.errors import PolicyWarning

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32
X = torch.ones(2, 4)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def method_wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(module: Any, /, *inputs: Any, **kwargs: Any) -> Any:
        return function(module, *inputs, **kwargs)

    return wrapper


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Base(nn.Module):
    """The paths of its ops are ``inner``, ``more.0``, ``named.a``, ``plain.0`` and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.more = nn.ModuleList([nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4))})
        self.plain = [nn.Linear(4, 4)]
        self.again = self.inner

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = (self.inner, self.more[0], self.named["a"], self.plain[0], self.again)
        return [part(x) for part in parts]


def model(wrap: Callable[[Any], Any], *, has_break: bool = False, hooked: str = "") -> nn.Module:
    class Net(Base):
        @wrap
        def forward(me, x: torch.Tensor) -> list[torch.Tensor]:  # noqa: N805 - Dynamo says L['me']
            outputs = me.outputs(x)
            if has_break:
                torch._dynamo.graph_break()
                outputs = me.outputs(x)
            return outputs

        def method(me, x: torch.Tensor) -> list[torch.Tensor]:  # noqa: N805
            return me.outputs(x)

        if hooked == "__call__":

            def __call__(me, *args: Any) -> Any:  # noqa: N805
                return super().__call__(*args)

    torch.manual_seed(0)
    net = Net().eval()
    if hooked == "hook":
        net.inner.register_forward_hook(lambda *_: None)
        net.register_forward_pre_hook(lambda *_: None)
    if hooked == "instance":
        forward = net.forward
        net.forward = functools.update_wrapper(  # as accelerate does
            functools.partial(lambda _, *args: forward(*args), net), forward
        )
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wrapped": lambda: model(wrapped),
    "plain": lambda: model(unchanged),
    "twice": lambda: model(lambda f: wrapped(wrapped(f))),
    "method": lambda: model(method_wrapped),
    "break": lambda: model(unchanged, has_break=True),
    "wrapped break": lambda: model(wrapped, has_break=True),
    "__call__": lambda: model(wrapped, hooked="__call__"),
    "hook": lambda: model(wrapped, hooked="hook"),
    "instance": lambda: model(unchanged, hooked="instance"),
}


class Trainer:
    """An object that holds a module."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def step(self, x: torch.Tensor) -> Any:
        return self.net(x)


Program = Any


def as_module(net: Any) -> Program:
    return net


def as_method(net: Any) -> Program:
    return net.method


def as_closure(net: Any) -> Program:
    def program(x: torch.Tensor) -> Any:
        return net(x)

    return program


def as_item(net: Any) -> Program:
    nets = {"net": net}

    def program(x: torch.Tensor) -> Any:
        return nets["net"](x)

    return program


def as_step_of_an_object(net: Any) -> Program:
    return Trainer(net).step


def as_parts(net: Any) -> Program:
    def program(x: torch.Tensor) -> Any:
        return net.outputs(x)

    return program


def compiled(way: Callable[[Any], Program], net: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(way(net), **options)


def in_place(net: nn.Module, **options: Any) -> Callable[..., Any]:
    net.compile(**options)
    return net


def with_argument(net: nn.Module, **options: Any) -> Callable[..., Any]:
    def program(net: Any, x: torch.Tensor) -> Any:
        return net(x)

    return functools.partial(torch.compile(program, **options), net)


def with_compiled_part(net: nn.Module, **options: Any) -> Callable[..., Any]:
    part: Any = torch.compile(net, **options)
    return torch.compile(nn.Sequential(part), **options)


WAYS: dict[str, Callable[..., Any]] = {
    "in place": in_place,
    "argument": with_argument,
    "compiled part": with_compiled_part,
    **{
        way.__name__: functools.partial(compiled, way)
        for way in (as_module, as_method, as_closure, as_item, as_step_of_an_object, as_parts)
    },
}


PATTERNS = {
    "inner": [f32, bf16, bf16, bf16, f32],
    "more": [bf16, f32, bf16, bf16, bf16],
    "named.*.0": [bf16, bf16, f32, bf16, bf16],
    "plain.0": [bf16, bf16, bf16, f32, bf16],
    nn.ModuleDict: [bf16, bf16, f32, bf16, bf16],
    "": [f32] * 5,
}
"""Patterns, and the dtypes of the outputs of ``Base.outputs`` under each."""


def run(name: str, way: str, pattern: Any) -> list[torch.dtype]:
    torch._dynamo.reset()
    if way == "compiled part" and isinstance(pattern, str):
        pattern = f"0.{pattern}".strip(".")
    options = {
        "policy": Policy.default().with_modules({pattern: "fp32"}),
        "compiler": "eager",
        "output_dtype": "autocast",
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        outputs = WAYS[way](MODELS[name](), backend="amp_fx", options=options)(X)
    return [output.dtype for output in outputs]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_patterns_match_in_wrapped_models(name: str) -> None:
    for pattern, dtypes in PATTERNS.items():
        assert run(name, "as_module", pattern) == dtypes, pattern


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_patterns_match_in_every_way_to_compile(way: str) -> None:
    names = ("wrapped", "wrapped break")[: 1 if way == "compiled part" else 2]
    for name in names:  # after a break, the settings of the inner compiled module apply
        for pattern, dtypes in PATTERNS.items():
            assert run(name, way, pattern) == dtypes, (name, pattern)
