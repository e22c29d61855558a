"""Counts what inductor's kernels read and write, while its scheduler generates code."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from torch import fx

from amp_fx.backend.lower import AotGraph
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import tensors_in
from amp_fx.replaced import replaced
from amp_fx.weights.aliases import viewed_by
from tests.traffic.collectives import collective_bytes
from tests.traffic.kernels import kernel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.traffic.kernels import Kernel


@dataclasses.dataclass
class Graph:
    """One graph that inductor got.

    Attributes:
        saved_bytes: Of a forward: what it saves for its backward, but for its inputs, weights and
            cached values among them.
        wire_bytes: Bytes that one rank hands to collectives.
        kernels: Its kernels, in order.
    """

    saved_bytes: int = 0
    wire_bytes: int = 0
    kernels: list[Kernel] = dataclasses.field(default_factory=list)


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
        """Returns the graphs compiled since the last call."""
        taken, self.graphs[:] = self.graphs.copy(), []
        return taken

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Replaces ``compile_fx_inner``: generates code, and returns a function that interprets."""
        own = fx.GraphModule(gm, copy.copy(gm.graph))  # inductor edits the graph it gets
        sent = collective_bytes(gm.graph)
        self.graphs.append(Graph(_saved_bytes(gm, kwargs), sent))
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
        """Returns the backend ``"inductor"``, which had its ``inner_compile`` bound before."""
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, example_inputs, inner_compile=self.compile)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Counts every graph, and builds no kernel.

        Relies on ``compile_fx_inner`` compiling one graph, ``Scheduler.codegen`` having its final
        nodes in ``nodes``, and ``AsyncCompile`` building each kernel.
        """
        from torch._inductor import async_compile, compile_fx, config, scheduler

        _real_compile()
        codegen = scheduler.Scheduler.codegen
        graphs = self.graphs

        def counted(this: Any) -> None:
            graphs[-1].kernels += [k for n in this.nodes if (k := kernel_of(n)) is not None]
            codegen(this)

        def unbuilt(*_: Any, **__: Any) -> _Unbuilt:
            return _Unbuilt()

        attributes = [
            (compile_fx, "compile_fx_inner", self.compile),
            (scheduler.Scheduler, "codegen", counted),
            (async_compile.AsyncCompile, "triton", unbuilt),
            (async_compile.AsyncCompile, "cpp_pybinding", unbuilt),
            (async_compile.AsyncCompile, "wait", lambda *_: None),
            (async_compile.AsyncCompile, "warm_pool", classmethod(lambda _: None)),
            (async_compile.AsyncCompile, "wakeup", classmethod(lambda _: None)),
        ]
        settings = {
            "compile_threads": 1,
            "fx_graph_cache": False,
            "shape_padding": False,  # whether it pays is measured, on the device
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
    """Kernel that is neither compiled nor run."""

    def run(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


def _saved_bytes(gm: fx.GraphModule, kwargs: Mapping[str, Any]) -> int:
    """Returns the bytes that a forward saves for its backward, but for its inputs."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    num_returned = AotGraph(gm, (), kwargs).num_returned
    saved = dict.fromkeys(n for n in outputs[num_returned:] if isinstance(n, fx.Node))
    made = [node for node in saved if viewed_by(node).op != "placeholder"]
    return sum(num_bytes(value) for node in made for value in tensors_in(node.meta.get("val")))
