"""Models with cached values, their twins, and everything that may happen to both.

A ``Session`` has two models of one program and a twin of each, to which the same happens: no value
of a twin is cached. Compiled calls are compared with calls of the twin in a new region of eager
autocast, bit for bit. All sessions share the compiled code, because compiling takes longer than a
hundred calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import weight_cache
from tests.weights.nets import SIZE, Net, assert_same, inputs, make_net, random
from tests.weights.writes import NEVER_KEPT, write_called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Program = Callable[[Net, torch.Tensor], Any]
    Step = tuple[Any, ...]

# ------------------------------------------------------------------------------------ programs

PENDING: list[Callable[[], Any]] = []
"""What happens in the next call of ``event``, after its first product."""


@torch.library.custom_op("amp_fx_machine::happen", mutates_args=())
def happen(x: torch.Tensor) -> torch.Tensor:
    """Does something that no graph knows of."""
    while PENDING:
        PENDING.pop()()
    return x.clone()


happen.register_fake(torch.empty_like)
happen.register_autograd(lambda _, grad: grad)

PROGRAMS: dict[str, Program] = {}
"""Functions of a ``Net`` and a batch, which use its weights in different ways."""

SAVES_WEIGHTS = {"computed", "two precisions", "results", "exponents", "elements", "tied"}
SAVES_WEIGHTS |= {"bodies", "checkpoints", "saved"}
"""Programs whose backward, in eager code, refuses to run after a write, or reads new weights."""

ROUNDED_ONCE = {
    "twice",
    "bodies",
    "checkpoints",
    "two precisions",
    "exponents",
    "elements",
    "writing",
}
"""Programs whose fused ops inductor rounds in another way, unless ``numerics="eager"``."""

RECOMPUTED = ("weight_norm",)
"""Prepared writes whose value is computed in each call: its kernel takes pointers for writing."""

WRITING = "writing"
"""The program that writes to its own weights: called without gradients, and by one thread."""


def _program(name: str) -> Callable[[Program], Program]:
    return lambda program: PROGRAMS.setdefault(name, program)


@_program("layers")
def layers(net: Net, x: torch.Tensor) -> Any:
    return net.b(torch.relu(net.a(x)))


@_program("event")
def event(net: Net, x: torch.Tensor) -> Any:
    return net.b(happen(torch.relu(net.a(x))))


@_program("twice")
def twice(net: Net, x: torch.Tensor) -> Any:
    return functional.linear(torch.tanh(net.a(net.b(x))), net.a.weight.t())


@_program("two precisions")
def two_precisions(net: Net, x: torch.Tensor) -> Any:
    low = net.a(x)
    with torch.autocast("cpu", enabled=False):
        return net.b(functional.linear(x, net.a.weight)), low


@_program("computed")
def computed(net: Net, x: torch.Tensor) -> Any:
    """Values that are computed from two weights; one of them is cast as well."""
    return functional.linear(net.b(x), net.a.weight * net.b.weight), net.a.bias * 3


@_program("checkpoints")
def checkpoints(net: Net, x: torch.Tensor) -> Any:
    """A checkpoint inside another."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(net.b(x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return net.a(net.a(checkpoint(inner, x, use_reentrant=False)))  # type: ignore[no-any-return]

    return torch.tanh(checkpoint(outer, x, use_reentrant=False))


@_program("bodies")
def bodies(net: Net, x: torch.Tensor) -> Any:
    """A checkpoint, and branches that share a weight (eager code casts a weight once for all)."""
    x = checkpoint(lambda x: torch.tanh(net.b(x)), x, use_reentrant=False)
    is_first, branches = x.sum() > 0, (net.a, lambda x: torch.tanh(net.a(x)))
    if torch.compiler.is_compiling():
        return torch.cond(is_first, *branches, (x,))
    return branches[0 if is_first else 1](x)  # in eager code, ``cond`` would compile


@_program("results")
def results(net: Net, x: torch.Tensor) -> Any:
    """Results that are weights, views of weights, constants, or values that could be cached."""
    weight, edges = net.a.weight, torch.tensor([-0.5, 0.0, 0.5])
    values = weight.bfloat16(), weight.bfloat16().view(-1)[2:], weight * 2, net.a.bias + 0
    copies = weight.clone(), weight.to(weight.dtype, copy=True), weight.clone().t()
    squares = [weight @ weight, (weight @ weight)[1]]
    constants = {
        "edges": edges,
        "of": torch.bucketize(x, edges),
        "joined": torch.cat([edges, x[0]]),
    }
    dropped = functional.dropout(functional.linear(x, weight), training=False)
    largest = weight.max(dim=1).values
    return dropped, weight, weight[1:].t(), *values, copies, squares, constants, largest


@_program("tied")
def tied(net: Net, x: torch.Tensor) -> Any:
    """An embedding that is the output projection as well: read in float32 and in a low dtype."""
    tokens = torch.arange(len(x))
    return functional.linear(functional.embedding(tokens, net.b.weight) + net.a(x), net.b.weight)


@_program("elements")
def elements(net: Net, x: torch.Tensor) -> Any:
    """Rows of weights in fused ops, and products with views of computed values."""
    a, b = net.a.weight, net.b.weight
    norm = functional.layer_norm(x, (SIZE,), a[0], b[1])
    products = x @ (a * b).t(), functional.linear(x, a.tanh())
    return norm, *products, x.sin() * a[1] + b[0], (a * b)[1:3], torch.cat([a])


class SavedAsGradient(torch.autograd.Function):
    """A function whose gradient is a tensor that it saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return x * 2 + other

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (*ctx.saved_tensors, None)


@_program("saved")
def saved(net: Net, x: torch.Tensor) -> Any:
    """A gradient that is a cached value, and values that a kernel of the backward reads last."""
    a, b = net.a.weight, net.b.weight.detach()
    value: Any = SavedAsGradient.apply(net.b.weight, a.detach().cumsum(0))  # type: ignore[no-untyped-call]
    masked = functional.linear(x, net.b.weight * (1 - a))
    return functional.linear(x, value), masked, x @ (a * (1 - b)).tanh() @ (a * (1 - b).t())


@_program(WRITING)
def writing(net: Net, x: torch.Tensor) -> Any:
    """Writes to a weight that was read before, and to a part of one that is read afterwards."""
    y = net.a(x)
    net.a.weight.data.neg_()
    net.b.weight.detach()[1:].neg_()
    return net.b(y), functional.linear(x, net.a.weight), net.b.weight.sum()


@_program("exponents")
def exponents(net: Net, x: torch.Tensor) -> Any:
    """Values that the backward reads, and a convolution, in which kernels add in place."""
    value = net.a.weight.exp() * net.b.weight
    images = x.tanh().mean(0).expand(SIZE, SIZE).reshape(1, 1, SIZE, SIZE)
    images = images.contiguous(memory_format=torch.channels_last)
    kernel = net.b.weight.flatten()[:9].reshape(1, 1, 3, 3)
    with torch.autocast("cpu", enabled=False):
        added = functional.conv2d(images, kernel, padding=1) + value.view(1, 1, SIZE, SIZE)
    return functional.linear(x, value), x.sum() * value, added, net.a.weight.exp()


# ---------------------------------------------------------------------------------------- ways


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compile and call a program.

    Attributes:
        compiler: The inner compiler.
        dtype: The low dtype.
        is_trained: Whether calls record gradients.
        is_inference: Whether calls run in inference mode.
        is_ambient: Whether calls run inside a region, which gives outputs their dtypes.
        options: Further options of the backend.
    """

    compiler: str = "aot_eager"
    dtype: torch.dtype = torch.bfloat16
    is_trained: bool = False
    is_inference: bool = False
    is_ambient: bool = False
    options: tuple[tuple[str, Any], ...] = ()


WAYS: dict[str, Way] = {
    "eval": Way(),
    "train": Way(is_trained=True),
    "float16": Way(dtype=torch.float16),
    "inference": Way(is_inference=True),
    "ambient": Way(is_trained=True, is_ambient=True),
    "packed": Way("inductor"),
    "frozen": Way("inductor", options=(("numerics", "eager"),)),
    "kept": Way("inductor", options=(("freezing", False), ("numerics", "eager"))),
    "trained": Way("inductor", is_trained=True, options=(("numerics", "eager"),)),
}
KEEP = "keep"
"""The way that compiles nothing: ``amp_fx.keep`` of all weights."""


@functools.cache
def compiled(program: str, way: Way, verify: str) -> Any:
    """Returns a compiled copy of a program, whose code Dynamo caches apart from the others'."""
    function: Any = PROGRAMS[program]
    code = function.__code__.replace(co_name=function.__name__)
    own = types.FunctionType(code, function.__globals__, function.__name__)
    chosen = dict(way.options) | {"dtype": way.dtype, "compiler": way.compiler, "verify": verify}
    options = chosen | {"weight_cache": "training", "fallback": False}
    return torch.compile(own, backend="amp_fx", options=options, dynamic=False)


def packed(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Several tensors, in which each element of each weight counts."""
    flat = torch.cat([w.reshape(-1).double() for w in weights])
    return flat.float().bfloat16(), flat.cumsum(0)


# ---------------------------------------------------------------------- roads to other storages

ROADS: dict[str, Any] = {}
"""By name; each gives some parameters other storages, which hold other contents."""


def _road(road: Any) -> Any:
    ROADS[road.__name__] = torch.no_grad()(road)
    return road


@_road
def data(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    for name, weight in new.items():
        model.get_parameter(name).data = weight


@_road
def tensor_set(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    for name, weight in new.items():
        torch.Tensor.set_(model.get_parameter(name), weight)  # type: ignore[call-overload]


@_road
def storage_set(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    for name, weight in new.items():
        storage, start = weight.untyped_storage(), weight.storage_offset()
        model.get_parameter(name).set_(storage, start, weight.shape, weight.stride())


@_road
def parameter(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    for name, weight in new.items():
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, nn.Parameter(weight))


@_road
def load_state_dict(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    state = {name: nn.Parameter(weight) for name, weight in new.items()}
    model.load_state_dict(state, strict=False, assign=True)


@_road
def swap_tensors(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    for name, weight in new.items():
        swap: Any = torch.utils.swap_tensors
        swap(model.get_parameter(name), nn.Parameter(weight))


@_road
def converted_by_swaps(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        converted(model, new)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@_road
def vector_to_parameters(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    vector = torch.cat([weight.reshape(-1) for weight in new.values()])
    nn.utils.vector_to_parameters(vector, [model.get_parameter(name) for name in new])


@_road
def converted(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    model.to(torch.float64)
    for name, weight in new.items():
        model.get_parameter(name).data.copy_(weight)
    model.double().float()


# --------------------------------------------------------------------- who writes during a call


def directly(write: Callable[[], Any]) -> None:
    write()


def by_collected_garbage(write: Callable[[], Any]) -> None:
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            write()

    Garbage()
    gc.collect(0)  # the youngest objects, of which this is one


def by_a_signal_handler(write: Callable[[], Any]) -> None:
    was = signal.signal(signal.SIGUSR1, lambda *_: write())
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0)
    signal.signal(signal.SIGUSR1, was)


def by_a_timer(write: Callable[[], Any]) -> None:
    done: list[bool] = []  # an event has a lock, which its own waiter may hold just then

    def ring(*_: object) -> None:
        write()
        done.append(True)

    was = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    until = time.monotonic() + 10
    while not done and time.monotonic() < until:
        time.sleep(0.001)
    signal.signal(signal.SIGALRM, was)
    assert done


def by_a_thread(write: Callable[[], Any]) -> None:
    run_all(write)


AGENTS: dict[str, Any] = {
    agent.__name__: agent
    for agent in (directly, by_collected_garbage, by_a_signal_handler, by_a_timer, by_a_thread)
}


def run_all(*jobs: Callable[[], Any]) -> None:
    """Runs jobs in threads of their own and raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


# ------------------------------------------------------------------------------------ a session


class Side:
    """A model, or its twin, with the storages of its weights and prepared writes."""

    def __init__(self, seed: int, prepared: Iterable[str]) -> None:
        self.net = make_net(seed)
        self.storages = {
            (name, version): random(SIZE, SIZE, seed=1000 * seed + 10 * version + i)
            for i, name in enumerate("ab")
            for version in (1, 2)
        }
        for name in "ab":
            self.storages[name, 0] = self.net.get_parameter(f"{name}.weight").data
        self.prepared = {name: write_called(name)(self.net) for name in prepared}

    def write(self, name: str, i: int) -> None:
        step = self.prepared.get(name) or write_called(name)(self.net)
        step(i)

    def move(self, road: str, names: str, version: int, is_new: bool) -> None:
        new = {f"{name}.weight": self.storages[name, version] for name in names}
        ROADS[road](self.net, {k: w.clone() for k, w in new.items()} if is_new else new)


class Session:
    """Two models of a program and their twins.

    Args:
        program: Name of the program.
        prepared: Names of writes that are prepared before the first call.
        verify: Of the backend.
    """

    def __init__(self, program: str, *prepared: str, verify: str = "off") -> None:
        weight_cache.clear()
        self.program = program
        self.verify = verify
        self.prepared = prepared
        self.num_steps = 0
        self.num_models = 0
        self.pairs = [self._new_pair(), self._new_pair()]
        self.held: list[tuple[Any, Any]] = []
        self.pending: list[tuple[Any, ...]] = []
        self.keeps: dict[tuple[int, ...], Any] = {}
        self.clones: list[torch.Tensor] = []
        self.is_cached = program != WRITING and not {*prepared} & {*NEVER_KEPT, *RECOMPUTED}
        weight_cache.set_limit(None)

    def _new_pair(self) -> tuple[Side, Side]:
        self.num_models += 1
        net, twin = (Side(self.num_models, self.prepared) for _ in range(2))
        return net, twin

    @property
    def net(self) -> Net:
        return self.pairs[0][0].net

    def run(self, steps: Iterable[Step]) -> None:
        """Takes steps: tuples of a method's name and its arguments."""
        for name, *args in steps:
            getattr(self, name)(*args)

    # ---------------------------------------------------------------------------------- calls

    def call(self, *names: str) -> None:
        """Calls the model in some ways, and compares results, gradients and held results."""
        for name in names:
            outs, expected, gradients = self._called(name)
            assert_same(outs, expected)
            if gradients is not None:
                assert_same(*gradients())
            del self.held[:-4]
            self.held.append((outs, expected))
        self.compare_held()

    def compare_held(self) -> None:
        """No later write, call or computation changes a result."""
        for outs, expected in self.held:
            assert_same(outs, expected)

    def _called(self, name: str) -> tuple[Any, Any, Any]:
        """Returns results, those of the twin, and what computes both gradients."""
        net, twin = (side.net for side in self.pairs[0])
        if name == KEEP:
            return self._kept(net), list(packed(*(p.detach() for p in twin.parameters()))), None
        way = self._way(name)
        x = inputs().to(net.a.weight.dtype)
        outs = self._call_compiled(way, net, x)
        expected = self._expected(way, twin, x)
        # Eager code: the output dtype of a compiled program without a region is float32.
        expected = [e.to(out.dtype) for e, out in zip(expected, outs, strict=True)]
        gradients = _gradients_of([(outs, net), (expected, twin)]) if way.is_trained else None
        return outs, expected, gradients

    def _way(self, name: str) -> Way:
        is_exact = name != "packed" or self.program not in ROUNDED_ONCE
        way = WAYS[name if is_exact else "frozen"]
        return dataclasses.replace(way, is_trained=way.is_trained and self.program != WRITING)

    def _expected(self, way: Way, twin: Net, x: torch.Tensor) -> list[torch.Tensor]:
        # Eager autocast's cache of casts would hide a write by the program itself.
        region = torch.autocast("cpu", way.dtype, cache_enabled=self.program != WRITING)
        with torch.set_grad_enabled(way.is_trained), region:
            return tree_leaves(PROGRAMS[self.program](twin, x))

    def _call_compiled(self, way: Way, net: Net, x: torch.Tensor) -> list[torch.Tensor]:
        mode = torch.inference_mode if way.is_inference else torch.set_grad_enabled
        region = torch.autocast("cpu", way.dtype) if way.is_ambient else contextlib.nullcontext()
        with mode(way.is_inference or way.is_trained), region:
            return tree_leaves(compiled(self.program, way, self.verify)(net, x))

    def _kept(self, net: Net) -> list[torch.Tensor]:
        """Returns the value of ``amp_fx.keep``, which belongs to the parameters of its time."""
        weights = tuple(net.parameters())
        key = tuple(map(id, weights))
        # Identities of parameters that were freed are used again.
        if key not in self.keeps or "was freed" in repr(self.keeps[key]):
            self.keeps = {key: amp_fx.keep(packed, *weights, verify=self.verify)}
        return list(self.keeps[key]())

    def forward(self, name: str) -> None:
        """Calls the model; the gradients are computed later."""
        is_trained = name != KEEP and self._way(name).is_trained
        if not self.pending and self.program not in SAVES_WEIGHTS and is_trained:
            self.pending.append(self._called(name))

    def backward(self) -> None:
        """Gradients belong to the weights of the forward, whatever was written since."""
        while self.pending:
            outs, expected, gradients = self.pending.pop()
            assert_same(outs, expected)
            assert_same(*gradients())

    def spoil(self, name: str) -> None:
        """Writes to results and gradients, which belong to the caller."""
        outs, expected, gradients = self._called(name)
        assert_same(outs, expected)
        both = [outs, expected]
        if gradients is not None:
            both = [x + y for x, y in zip(both, gradients(), strict=True)]
        with torch.no_grad(), torch.inference_mode(WAYS[name].is_inference):
            for tensor in (tensor for tensors in both for tensor in tensors):
                tensor.detach().mul_(-2)
        self.call(name)

    def together(self, *names: str) -> None:
        """Calls in several threads at once, which all see the latest weights."""
        names = self._for_threads(names)
        results = self._call_in_threads(names, 2)
        for name, outs in zip(names, results, strict=True):
            _assert_one_of(outs, [self._now(name)])

    def race(self, step: Step, *names: str) -> None:
        """Calls in several threads during another step; later calls see the last write."""
        names = self._for_threads(names)
        self.is_cached = False  # for a while, another thread may be in the middle of a write
        possible = {name: [self._now(name)] for name in names}
        name, *args = step
        results = self._call_in_threads(names, 10, lambda: getattr(self, name)(*args), 10)
        for way, outs in zip(names, results, strict=True):
            if name != "write":
                _assert_one_of(outs, possible[way])

    def race_moves(self, *names: str) -> None:
        """Calls in threads while a weight moves: each result belongs to one of its storages."""
        if self.program != "layers":
            return  # where a weight is read twice, a call may see two of its storages
        names = self._for_threads(names)
        self.is_cached = False
        versions = itertools.cycle((1, 2, 0))
        possible: dict[str, list[Any]] = {name: [self._now(name)] for name in names}

        def move() -> None:
            self.pairs[0][0].move("data", "a", next(versions), False)

        for version in (1, 2, 0):  # both models end at the first storage
            self.pairs[0][1].move("data", "a", version, False)
            for name in names:
                possible[name].append(self._now(name))
        results = self._call_in_threads(names, 10, move, 12)
        for name, outs in zip(names, results, strict=True):
            _assert_one_of(outs, possible[name])

    def _for_threads(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the ways that threads can go at once."""
        if self.program == WRITING or self.net.a.weight.dtype != torch.float32:
            return ()
        return tuple(name for name in names if name != KEEP and not WAYS[name].is_trained)

    def _call_in_threads(
        self,
        names: Sequence[str],
        num_calls: int,
        disturb: Callable[[], Any] = lambda: None,
        num_times: int = 0,
    ) -> list[list[Any]]:
        """Returns the results of each way, whose calls run in a thread of its own."""
        results: list[list[Any]] = [[] for _ in names]
        start = threading.Barrier(len(names) + 1)

        def job(name: str, outs: list[Any]) -> None:
            start.wait(30)
            outs += [
                self._call_compiled(self._way(name), self.net, inputs()) for _ in range(num_calls)
            ]

        def disturber() -> None:
            start.wait(30)
            for _ in range(num_times):
                disturb()
                time.sleep(0)

        jobs = [functools.partial(job, *each) for each in zip(names, results, strict=True)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            run_all(disturber, *jobs)
        finally:
            sys.setswitchinterval(interval)
        return results

    def _now(self, name: str) -> list[torch.Tensor]:
        """Returns the current results of the twin."""
        return self._expected(self._way(name), self.pairs[0][1].net, inputs())

    def settle(self, name: str) -> None:
        """Without a write, values are cached, and no call computes them again.

        After a write by another thread, they are computed again for a while: it may go on.
        """
        self.call(name, name)
        end = time.monotonic() + 5
        while True:
            before = weight_cache.stats()
            self.call(name)
            after = weight_cache.stats()
            if after.refreshes == before.refreshes or time.monotonic() > end:
                break
        if self.is_cached:
            assert after.hits > before.hits, "no cached value was used"
            assert after.refreshes == before.refreshes, "a value was computed again"

    # --------------------------------------------------------------------------------- writes

    def write(self, name: str) -> None:
        """Writes to the model and its twin."""
        self.num_steps += 1
        if name == "prepared":
            name = self.prepared[self.num_steps % len(self.prepared)] if self.prepared else "mul_"
        if name == "layers_grown":
            self.held.clear()  # PyTorch refuses a backward next to one of weights of another size
        for side in self.pairs[0]:
            side.write(name, self.num_steps)

    def move(self, road: str, names: str, version: int, is_new: bool) -> None:
        """Moves weights to other storages, or back to those where they were."""
        if "swap" in road and self.pending:
            return  # PyTorch refuses tensors that a backward refers to
        self.held.clear()  # views of weights, which PyTorch refuses to swap, too
        for side in self.pairs[0]:
            side.move(road, names, version, is_new)

    def inside(self, way: str, name: str, agent: str, is_read: bool = False) -> None:
        """Writes to the model during a call, between its two products."""
        if self.program != "event" or way == KEEP or self.net.a.weight.dtype != torch.float32:
            return  # with two dtypes in one call, eager code raises, too
        self.num_steps += 1
        net, twin = self.pairs[0]
        PENDING.append(
            functools.partial(AGENTS[agent], functools.partial(net.write, name, self.num_steps))
        )
        if is_read:  # kernels of others may ask for a pointer to read, before the write
            PENDING.append(net.net.a.weight.data_ptr)
        self._call_compiled(self._way(way), net.net, inputs())
        assert not PENDING
        twin.write(name, self.num_steps)

    def clone_lazily(self, name: str, fate: str) -> None:
        """Makes a copy-on-write clone of a weight, which is held, written or dropped."""
        clone = torch._lazy_clone(self.net.get_parameter(f"{name}.weight").detach())
        if fate != "dropped":
            self.clones.append(clone)
        if fate == "written":
            clone.mul_(7)
        self.is_cached = False  # values are stale until either tensor is written

    # ------------------------------------------------------------------------ the cache, models

    def cache(self, what: str) -> None:
        """Disturbs the cache."""
        actions: dict[str, Callable[[], Any]] = {
            "clear": weight_cache.clear,
            "invalidate": weight_cache.invalidate,
            "invalidate one": lambda: weight_cache.invalidate(self.net.a.weight),
            "limit": lambda: weight_cache.set_limit(100),
            "collect": gc.collect,
        }
        actions[what]()
        self.is_cached &= what != "limit"

    def turn(self) -> None:
        """Goes on with the other model, which has the same compiled code."""
        self.backward()
        self.held.clear()
        self.pairs.reverse()

    def renew(self) -> None:
        """Replaces the other model, so that identities and memory of its weights are free."""
        self.pairs[1] = self._new_pair()
        gc.collect()

    def finish(self, names: Iterable[str]) -> None:
        """Compares all that is left."""
        for _ in self.pairs:
            self.call(*names)
            self.turn()


def _assert_one_of(results: list[Any], possible: list[Any]) -> None:
    for outs in results:
        found = [[e.to(o.dtype) for e, o in zip(each, outs, strict=True)] for each in possible]
        if not any(all(map(torch.equal, outs, each)) for each in found):
            assert_same(outs, found[0])


def _gradients_of(pairs: Sequence[tuple[list[torch.Tensor], nn.Module]]) -> Any:
    """Returns a function that computes the gradients of outputs for the parameters of now."""
    wanted = [(outs, [p for p in net.parameters() if p.requires_grad]) for outs, net in pairs]

    def compute() -> list[list[torch.Tensor]]:
        found = []
        for outs, parameters in wanted:
            trained = [out for out in outs if out.requires_grad][:2]  # sums of two have one order
            seeds = [random(*out.shape, seed=i).to(out.dtype) for i, out in enumerate(trained)]
            gradients = torch.autograd.grad(trained, parameters, seeds, materialize_grads=True)
            found.append(list(gradients))
        return found

    return compute
