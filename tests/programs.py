"""Small programs as the graphs that Dynamo captures, and graphs as text."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

from amp_fx.backend.pipeline import captured_passes, run_passes
from amp_fx.graphs.records import AutocastSite
from amp_fx.graphs.values import tensors_in
from amp_fx.policies.policy import preset
from amp_fx.regions.module_stack import compile_frame, module_stack
from amp_fx.regions.state import AutocastState

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from amp_fx.policies.policy import Policy

    Program = Callable[..., Any]

POLICY = preset("torch")
"""The default policy."""

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.bool: "bool",
}


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph as Dynamo made it, callable with the arguments of the program."""

    gm: fx.GraphModule
    order: tuple[int, ...]
    """For each input of the graph, which argument of the program it is."""

    def __call__(self, *args: Any) -> Any:
        """Runs the graph on arguments of the program; one output comes back bare."""
        outputs = self.gm(*(args[i] for i in self.order))
        return outputs[0] if len(outputs) == 1 else outputs

    def node(self, name: str) -> fx.Node:
        """Returns the node that has a name in the text."""
        [found] = [node for node, other in node_names(self.gm.graph).items() if other == name]
        return found

    def text(self) -> str:
        """Returns the graph as text."""
        return graph_text(self.gm)


def capture_program(program: Program, *args: torch.Tensor) -> Captured:
    """Captures a program of tensors, which must be one graph."""
    found: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Program:
        def call(*inputs: Any) -> Any:
            found.append((gm, inputs))
            return gm(*inputs)

        return call

    torch.compile(program, backend=backend, dynamic=False, fullgraph=True)(*args)
    [(gm, inputs)] = found
    positions = {id(arg): i for i, arg in enumerate(args)}
    return Captured(gm, tuple(positions[id(value)] for value in inputs))


def symbolic(*sizes: int) -> torch.Tensor:
    """Returns a fake tensor, all of whose sizes are symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(sizes))
    return mode.from_tensor(torch.ones(sizes), symbolic_context=dynamic)


def graph_text(gm: fx.GraphModule) -> str:
    """Returns a graph as text: ``relu: bf16 = aten.relu.default(x)``, a line for each node.

    Methods begin with a dot. The dtype is that of ``meta["val"]`` or, before a pass has
    set one, that which was captured. Nodes are named after what they call, so that the
    text depends neither on the names that Dynamo gives nor on those that passes give.
    """
    names = node_names(gm.graph)

    def show(arg: Any) -> str:
        return re.sub(r"<(\d+)>", lambda m: ordered[int(m[1])], repr(map_arg(arg, refer)))

    ordered = list(names.values())
    indices = {node: i for i, node in enumerate(names)}

    def refer(node: fx.Node) -> Any:
        return _Reference(indices[node])

    typed = {node: name + _dtypes(node) for node, name in names.items()}
    inputs = ", ".join(typed[node] for node in gm.graph.find_nodes(op="placeholder"))
    lines = [f"graph({inputs})"]
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {show(node.args[0])}")
        elif node.op == "get_attr":
            lines.append(f"{names[node]} = self.{node.target}")
        elif node.op != "placeholder":
            parts = [*map(show, node.args), *(f"{k}={show(v)}" for k, v in node.kwargs.items())]
            dot = "." if node.op == "call_method" else ""
            lines.append(f"{typed[node]} = {dot}{_target_name(node)}({', '.join(parts)})")
    return "\n".join(lines)


class _Reference:
    """Placeholder of a node in the text of an argument."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


def node_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for each node: an input's own, a cast's source and dtype, else what it calls."""
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        base = _base_name(node, names)
        suffixes = ("", *(f"_{i}" for i in range(1, len(graph.nodes))))
        names[node] = next(base + suffix for suffix in suffixes if base + suffix not in taken)
        taken.add(names[node])
    return names


def _base_name(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op == "placeholder":
        return re.sub(r"^l_(self_)?|modules_|parameters_|buffers_|_$", "", str(node.target).lower())
    if "cast" in node.meta:
        return f"{names[node.all_input_nodes[0]]}_{_short(node.meta['cast'].dtype)}"
    name = _target_name(node).split(".")
    return name[-2 if isinstance(node.target, torch._ops.OpOverload) else -1].lstrip("_")


def _target_name(node: fx.Node) -> str:
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _dtypes(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    dtypes = ", ".join(_short(t.dtype) for t in tensors_in(value))
    if not dtypes:
        return ""
    return f": {dtypes}" if isinstance(value, torch.Tensor) else f": ({dtypes})"


def _short(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype))


def run_settling(gm: fx.GraphModule, passes: Sequence[Any]) -> Counter[str]:
    """Runs passes and checks the graph, which the last of them leaves alone in a second run."""
    counts = run_passes(gm, passes, check=True)[-1].counts
    before = graph_text(gm)
    assert not passes[-1].call(gm).modified
    assert graph_text(gm) == before
    return counts


def matrices(
    rng: torch.Generator, count: int = 2, *, is_frozen: bool = False
) -> list[torch.Tensor]:
    """Small square inputs, which want gradients unless they are frozen."""
    return [torch.randn(4, 4, generator=rng).requires_grad_(not is_frozen) for _ in range(count)]


def compiled(program: Program, *, compiler: str = "eager", **options: Any) -> Program:
    """Returns the program compiled by amp_fx; options are those of the backend."""
    options["compiler"] = compiler
    result: Program = torch.compile(program, backend="amp_fx", options=options)
    return result


def site(
    dtype: torch.dtype = torch.bfloat16,
    *,
    device_type: str = "cpu",
    enabled: bool = True,
    cache_enabled: bool = True,
    is_grad_enabled: bool = True,
) -> AutocastSite:
    """Returns a place inside one autocast region."""
    state = AutocastState.ambient().turned(
        device_type, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled
    )
    return AutocastSite(state, is_grad_enabled)


@dataclasses.dataclass(frozen=True)
class Run:
    """Outputs of a program, and gradients of the arguments that require one."""

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor | None]


def run_program(
    program: Program, args: Sequence[torch.Tensor], dtype: torch.dtype | None = None, **region: Any
) -> Run:
    """Runs a program on copies of its arguments, the forward in a region if a dtype is given."""
    leaves = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    # A region that is off would keep the bare backend from being one.
    around = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype, **region)
    with around:
        outputs = tensors_in(program(*leaves))
    differentiable = [out for out in outputs if out.requires_grad]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    grads: list[torch.Tensor | None] = []
    if differentiable and inputs:
        generator = torch.Generator().manual_seed(0)
        seeds = [
            torch.randn(out.shape, generator=generator).to(out.dtype) for out in differentiable
        ]
        grads = list(torch.autograd.grad(differentiable, inputs, seeds, allow_unused=True))
    return Run(outputs, grads)


def assert_same_bits(actual: Run, expected: Run) -> None:
    """Fails unless two runs gave equal dtypes and equal bits, gradients included."""
    torch.testing.assert_close(
        (actual.outputs, actual.grads),
        (expected.outputs, expected.grads),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@dataclasses.dataclass(frozen=True)
class Decided:
    """An op with a policy in a rewritten graph: how it is cast, in which module, and why."""

    op: str
    path: str
    policy: str
    origin: str


def decisions_of(
    program: Program, *args: torch.Tensor, policy: Policy, dtype: torch.dtype = torch.bfloat16
) -> list[Decided]:
    """Returns the decisions of a policy about a program with modules, in the order of its ops."""
    found: list[Decided] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Program:
        frame = compile_frame(gm)
        run_passes(
            gm, captured_passes(policy, site(dtype), restores_outputs=True, frame=frame), check=True
        )
        for node in gm.graph.nodes:
            stack = module_stack(node, frame)
            path = stack[-1][0] if stack else ""
            made = node.meta.get("decisions", ())
            found.extend(Decided(d.op, path, d.policy.value, d.origin) for d in made)
        return gm

    torch.compile(program, backend=backend)(*args)
    return found
