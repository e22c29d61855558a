"""A graph in two variants: one keeps values of its weights, the other casts weights itself.

Where every update of the weights is followed by one call, keeping gains nothing: native autocast
reads and writes no more memory, with its casts next to the products that use them. Such a graph
uses the variant that casts, which is what native autocast compiles. It changes to the other as
soon as a call finds the weights as the call before did, and back after some updates in a row that
were followed by one call each.

Whether the weights are as they were is asked of the smallest one. That is a guess of what pays;
what is right does not depend on it. On accelerators there is only the variant that keeps: a
refresh of all takes a launch or two there, casts inside a launch each, and CUDA graphs want copies
that keep their addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols

from amp_fx.graphs.values import value_of
from amp_fx.weights.kept_call import CannotKeepError, GaveUpError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from amp_fx.weights.kept_call import KeptCall
    from amp_fx.weights.store import Weights

    Compiled = Callable[..., Any]

T = TypeVar("T")

MOST_PATIENCE = 1024
"""Calls in a row that have to find weights unchanged, at most, before values are kept once more."""


class Unchanged:
    """Stands among the values of a graph for nothing but whether a weight was written."""

    ops = ()
    is_alias = False

    def __init__(self, position: int, name: str) -> None:
        self.positions = (position,)
        self.names = (name,)

    def key(self, weights: Weights) -> Hashable:  # noqa: ARG002
        """One for each graph."""
        return self

    def make(self, weights: Weights) -> Any:  # noqa: ARG002
        """No tensors."""
        return ()

    def laid_out(self, weight: torch.Tensor) -> None:
        """It is no cast."""


@dataclasses.dataclass(frozen=True)
class Casting:
    """The variant of a graph that casts."""

    inputs: KeptCall
    compiled: Compiled


class Later(Generic[T]):
    """A variant that is compiled when it is first called."""

    def __init__(self, make: Callable[[Sequence[Any]], T]) -> None:
        self._make: Callable[[Sequence[Any]], T] | None = make
        self._made: T | None = None

    @classmethod
    def made(cls, variant: T) -> Later[T]:
        """A variant that is compiled already."""
        later: Later[T] = cls(lambda _: variant)
        later._made = variant
        return later

    def get(self, args: Sequence[Any]) -> T:
        """The variant."""
        if self._made is None:
            with compile_lock():
                if self._make is not None:
                    with own_tracing():
                        self._made = self._make(args)
                    self._make = None
        assert self._made is not None
        return self._made


class TwoVariants:
    """A compiled graph that keeps values of weights where that saves any work."""

    def __init__(
        self, keeping: Later[Compiled], casting: Later[Casting], *, is_keeping: bool
    ) -> None:
        self.keeping, self.casting = keeping, casting
        self.is_keeping = is_keeping
        self._num_unchanged = 0
        self._patience = 1  # calls in a row that have to find weights unchanged

    def __call__(self, *args: Any) -> Any:
        """Calls the graph with the inputs that Dynamo knows."""
        if self.is_keeping:
            try:
                return self.keeping.get(args)(*args)
            except CannotKeepError:
                pass  # which says nothing of the weights of other layers
            except GaveUpError:
                self._give_up()
        return self._call_casting(args)

    def _give_up(self) -> None:
        self.is_keeping = False
        self._num_unchanged = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)

    def _call_casting(self, args: tuple[Any, ...]) -> Any:
        casting = self.casting.get(args)
        found = casting.inputs.enter(args)
        self._num_unchanged = 0 if found is None else self._num_unchanged + 1
        if found is not None and not self.is_keeping and self._shall_keep(args):
            casting.inputs.leave()
            self.is_keeping = True
            return self(*args)
        _, inputs = found or casting.inputs.prepare(args)
        try:
            return casting.compiled(*inputs)
        finally:
            casting.inputs.leave()

    def _shall_keep(self, args: tuple[Any, ...]) -> bool:
        """Whether a call that finds weights unchanged is to be the first that keeps values.

        Dynamo's ``DDPOptimizer`` calls with fake tensors what it has compiled, to learn of its
        outputs, and counts how often AOTAutograd is called.
        """
        is_time = self._num_unchanged >= self._patience
        is_real = not any(isinstance(a, FakeTensor) for a in args)
        return is_time and is_real


def has_dynamic_inputs(gm: fx.GraphModule) -> bool:
    """Whether any input of a graph is a number, or a tensor whose shape is symbolic."""
    return any(is_dynamic(value_of(node)) for node in gm.graph.find_nodes(op="placeholder"))


def is_dynamic(value: Any) -> bool:
    """Whether an input is a number, or a tensor whose shape is symbolic."""
    return not isinstance(value, torch.Tensor) or bool(free_symbols(value))


@contextlib.contextmanager
def own_tracing() -> Iterator[None]:
    """Gives what is compiled a context of its own, which refers to no weight afterwards.

    ``torch.utils.swap_tensors`` refuses tensors that anything refers to weakly. Relies on
    ``MetaTensorDescriber.lookup_tensor`` and ``TracingContext.tensor_to_context`` being all that
    refers so to the tensors that fakes are made of; Dynamo clears both behind what it compiles
    (``torch._dynamo.convert_frame._clear_fake_mode_weakrefs``).
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext(fake_mode)
    try:
        with tracing(context), tracing_alone():
            yield
    finally:
        context.tensor_to_context.clear()
        describer = fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def compile_lock() -> AbstractContextManager[Any]:
    """Dynamo's: tracing is not safe next to another thread that traces.

    Relies on ``torch._dynamo.convert_frame.compile_lock``.
    """
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """Lets other threads go on calling what is compiled while this one traces.

    Compiled functions refuse to be called while ``fx`` traces. Until torch 2.15 the flag that
    says so belongs to all threads. Dynamo's compilations set
    ``torch.compiler._is_compiling_flag`` besides, which lets such calls through, but makes
    optimizers in other threads compute otherwise. Wants ``compile_lock`` to be held.
    """
    _tracing_threads.append(threading.get_ident())
    try:
        _localize_flag()
        yield
    finally:
        _tracing_threads.pop()


_tracing_threads: list[int] = []


def _traces_elsewhere() -> bool:
    return bool(_tracing_threads) and threading.get_ident() not in _tracing_threads


@functools.cache
def _localize_flag() -> None:
    """Makes ``is_fx_symbolic_tracing`` ask ``_traces_elsewhere``, too.

    Compiled functions refer to that very function, so it gets other code. Relies on
    ``torch.fx._symbolic_trace._is_fx_tracing_flag``.
    """
    from torch.fx import _symbolic_trace as module

    if not hasattr(module, "_is_fx_tracing_flag"):
        return  # since torch 2.15

    def is_fx_symbolic_tracing() -> bool:
        return (
            _is_fx_tracing_flag  # type: ignore[name-defined]  # noqa: F821
            and not torch.compiler.is_compiling()
            and not _amp_fx_traces_elsewhere()  # type: ignore[name-defined]  # noqa: F821
        )

    module._amp_fx_traces_elsewhere = _traces_elsewhere  # type: ignore[attr-defined]
    module.is_fx_symbolic_tracing.__code__ = is_fx_symbolic_tracing.__code__
