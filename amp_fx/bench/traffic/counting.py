"""What inductor's kernels read and write, asked of its scheduler while it generates code."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GENERATED, EXTERN = "generated", "extern"
CAST, LAYOUT = "cast", "layout"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        kind: ``"generated"`` by inductor; of those, ``"cast"`` one that does nothing but cast and
            ``"layout"`` one that only copies into another layout; ``"extern"`` a library's.
        name: The ops that it came from.
        num_bytes: What it reads and writes.
    """

    kind: str
    name: str
    num_bytes: int


@dataclasses.dataclass
class Graph:
    """One graph that inductor got.

    Attributes:
        saved_bytes: Of a backward: of what the forward saves for it and is no input of the program.
        kernels: Its kernels, in order.
        sources: Of its generated kernels, by name.
    """

    saved_bytes: int = 0
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Counter:
    """Collects the graphs that are compiled while it listens.

    Attributes:
        fake_mode: That of all tensors.
        graphs: What was compiled, in order.
    """

    fake_mode: Any
    graphs: list[Graph] = dataclasses.field(default_factory=list)

    def take(self) -> list[Graph]:
        """What was compiled since this was asked."""
        taken, self.graphs[:] = self.graphs.copy(), []
        return taken

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Stands for ``compile_fx_inner``: generates code, and gives what runs the graph itself."""
        is_backward = bool(kwargs.get("is_backward"))
        own = fx.GraphModule(gm, copy.copy(gm.graph))  # inductor edits the graph it gets
        self.graphs.append(Graph(_saved_bytes(gm) if is_backward else 0))
        compiled = _real_compile()(gm, example_inputs, **kwargs)

        def run(inputs: list[Any]) -> Any:
            args = list(inputs)
            inputs.clear()
            with self.fake_mode:
                return tuple(own(*args))

        run._boxed_call = True  # type: ignore[attr-defined]
        run.compiled = compiled  # type: ignore[attr-defined]
        return run

    def inductor(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """The backend ``"inductor"``, which had its ``inner_compile`` bound before."""
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, example_inputs, inner_compile=self.compile)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Has every graph counted, and no kernel built.

        Relies on ``compile_fx_inner`` compiling one graph, ``Scheduler.codegen`` having its final
        nodes in ``nodes``, and ``AsyncCompile`` getting the source of each kernel.
        """
        from torch._inductor import async_compile, compile_fx, config, scheduler

        _real_compile()
        codegen = scheduler.Scheduler.codegen
        graphs = self.graphs

        def counted(this: Any) -> None:
            graphs[-1].kernels += [k for n in this.nodes if (k := _kernel_of(n)) is not None]
            codegen(this)

        def noted(_: Any, name: str, source: str, *__: Any, **___: Any) -> _Unbuilt:
            graphs[-1].sources[name] = source
            return _Unbuilt()

        def noted_cpp(_: Any, __: Any, source: str, *___: Any, **____: Any) -> _Unbuilt:
            graphs[-1].sources[f"cpp{len(graphs[-1].sources)}"] = source
            return _Unbuilt()

        attributes = [
            (compile_fx, "compile_fx_inner", self.compile),
            (scheduler.Scheduler, "codegen", counted),
            (async_compile.AsyncCompile, "triton", noted),
            (async_compile.AsyncCompile, "cpp_pybinding", noted_cpp),
            (async_compile.AsyncCompile, "wait", lambda *_: None),
            (async_compile.AsyncCompile, "warm_pool", classmethod(lambda _: None)),
            (async_compile.AsyncCompile, "wakeup", classmethod(lambda _: None)),
        ]
        settings = {
            "compile_threads": 1,
            "fx_graph_cache": False,
            "triton.unique_kernel_names": True,
        }
        with replaced(*attributes), config.patch(settings):
            yield


_real: list[Callable[..., Any]] = []


def _real_compile() -> Callable[..., Any]:
    if not _real:
        from torch._inductor import compile_fx

        _real.append(compile_fx.compile_fx_inner)
    return _real[0]


class _Unbuilt:
    """A kernel of which only the source is wanted."""

    def run(self, *_: Any, **__: Any) -> None:
        """Nothing calls it."""


def _saved_bytes(gm: fx.GraphModule) -> int:
    """What a backward gets, but for the gradients and the inputs of the program."""
    return sum(
        tensor_bytes(node.meta.get("val"))
        for node in gm.graph.find_nodes(op="placeholder")
        if not node.name.startswith(("primals", "tangents"))
    )


def tensor_bytes(value: Any) -> int:
    """The size of a tensor; 0 for anything else."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _kernel_of(node: Any) -> Kernel | None:
    """What one node of the scheduler becomes; None for what runs nothing."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    if isinstance(node, NopKernelSchedulerNode):
        return None
    num_bytes = int(node.get_read_write_buffers_sizes()) + _constant_bytes(node)
    if isinstance(node, ExternKernelSchedulerNode):
        if isinstance(node.node, MultiOutput):
            return None
        name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        return Kernel(EXTERN, str(name), num_bytes)
    return Kernel(_kind_of(node), _origins_of(node), num_bytes)


def _constant_bytes(node: Any) -> int:
    """What a kernel reads of frozen weights, at most all: inductor counts inputs and buffers only.

    As there, an element of the kernel's ranges reads one of each.
    """
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    names = [dep.name for dep in node.read_writes.reads if dep.name in V.graph.constants]
    sizes = {name: V.graph.constants[name].numel() for name in names}
    if isinstance(node, SchedulerNode):
        ranges = [
            int(V.graph.sizevars.optimization_hint(n)) for part in node.get_ranges() for n in part
        ]
        sizes = {n: min(size, names.count(n) * math.prod(ranges)) for n, size in sizes.items()}
    return sum(size * V.graph.constants[name].element_size() for name, size in sizes.items())


def _origins_of(node: Any) -> str:
    origins = {o for part in node.get_nodes() if part.node for o in part.node.get_origins()}
    targets = {o.target for o in origins if o.op == "call_function"}
    return "+".join(sorted({getattr(target, "__name__", str(target)) for target in targets}))


_MOVES = frozenset({"load", "store", "to_dtype", "get_index", "index_expr", "output"})
"""What the loop of a kernel does that computes nothing."""


def _kind_of(node: Any) -> str:
    """Whether a generated kernel computes, only casts, or only copies."""
    from torch._inductor.virtualized import V

    bodies = [getattr(part, "_body", None) for part in node.get_nodes()]
    if any(body is None or not body.op_counts.keys() <= _MOVES for body in bodies):
        return GENERATED
    touched = node.read_writes.reads | node.read_writes.writes
    return LAYOUT if len({V.graph.get_dtype(dep.name) for dep in touched}) == 1 else CAST
