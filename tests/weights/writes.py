"""Writes to a weight: each is prepared for a model and then called step by step.

The same steps on a twin give the same weights, bit for bit. Some need a model with ordinary
storages, some create their storage. Each is listed under the signal that reports it
(``amp_fx.weights.write_signals``); if several do, under the one that the others cannot replace.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.dlpack import from_dlpack

from tests.weights.cuda_like import alias, cuda_like
from tests.weights.nets import SIZE, Net, compile_amp_fx, inputs, make_net, random

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[int], None]
    Write = Callable[[Net], Step]

WRITES: dict[str, Write] = {}
"""By name; each takes a model and gives what writes to it."""

HARD_WRITES: dict[str, Write] = {}
"""Those whose signal is neither a request for a pointer nor another place."""

NEVER_KEPT = ("numpy_backed", "mapped_file")
"""Those to memory that PyTorch did not allocate: nothing is kept of such a weight."""

SIGNALS: dict[str, list[str]] = {
    name: [] for name in ("storage", "place", "version", "list op", "step", "sample")
}
"""The names of all writes, by signal."""

COUNT = SIZE * SIZE


def write_called(name: str) -> Write:
    """One of all writes."""
    return WRITES[name] if name in WRITES else HARD_WRITES[name]


def _add(name: str, write: Write, signal: str) -> None:
    (WRITES if signal in ("storage", "place") else HARD_WRITES)[name] = write
    SIGNALS[signal].append(name)


def _write(signal: str) -> Callable[[Callable[[Net, int], Any]], None]:
    """Registers a write that needs no preparation."""

    def add(change: Callable[[Net, int], Any]) -> None:
        def prepare(net: Net) -> Step:
            def step(i: int) -> None:
                with torch.no_grad():
                    change(net, i)

            return step

        _add(change.__name__, prepare, signal)

    return add


def _prepared(signal: str) -> Callable[[Write], None]:
    """Registers a write that sets something up before the model is first called."""
    return lambda prepare: _add(prepare.__name__, prepare, signal)


def other(i: int, *shape: int) -> torch.Tensor:
    """New contents for a weight."""
    return random(*(shape or (SIZE, SIZE)), seed=1000 + i)


def _each(signal: str, **changes: Callable[[Any, int], Any]) -> None:
    """Registers writes to one parameter under no_grad."""
    for name, change in changes.items():

        def apply(net: Net, i: int, change: Callable[[Any, int], Any] = change) -> None:
            change(net.a.weight, i)

        apply.__name__ = name
        _write(signal)(apply)


_each(
    "storage",
    mul_=lambda p, _: p.mul_(1.5),
    copy_=lambda p, i: p.copy_(other(i)),
    add_to_detached=lambda p, i: p.detach().add_(other(i)),
    lerp_=lambda p, i: p.lerp_(other(i), 0.25),
    fill_one_entry=lambda p, i: p.__setitem__((i % SIZE, 1), 3.0 + i),
    write_row_of_view=lambda p, i: p.view(-1)[SIZE : 2 * SIZE].fill_(i + 0.5),
    index_fill_=lambda p, i: p.index_fill_(0, torch.tensor([i % SIZE]), i + 0.25),
    masked_fill_=lambda p, _: p.masked_fill_(p > 0.3, 0.3),
    scatter_=lambda p, i: p.scatter_(0, torch.zeros(1, SIZE, dtype=torch.int64), other(i)),
    out_argument=lambda p, i: torch.mul(other(i), 2.0, out=p),
    initialise=lambda p, _: nn.init.constant_(p, 0.125),
    orthogonal=lambda p, _: nn.init.orthogonal_(p, generator=torch.Generator().manual_seed(0)),
    data_mul_=lambda p, _: p.data.mul_(1.5),
    data_copy_=lambda p, i: p.data.copy_(other(i)),
    data_entry=lambda p, i: p.data.__setitem__((1, i % SIZE), 3.0 + i),
    data_uniform_=lambda p, _: p.data.uniform_(-1, 1, generator=torch.Generator().manual_seed(5)),
    foreach_mul_=lambda p, _: torch._foreach_mul_([p], 1.5),
    foreach_copy_=lambda p, i: torch._foreach_copy_([p.data], [other(i)]),
    foreach_lerp_=lambda p, i: torch._foreach_lerp_([p], [other(i)], 0.5),
    numpy_of_detached=lambda p, _: p.detach().numpy().__imul__(1.5),
    numpy_of_data=lambda p, i: p.data.numpy().__setitem__(0, i + 0.75),
    numpy_array_protocol=lambda p, _: torch.from_numpy(p.detach().numpy()).mul_(1.5),
    dlpack=lambda p, _: from_dlpack(p.detach()).mul_(1.5),
    memmove=lambda p, i: _memmove(p, other(i)),
    storage_copy_=lambda p, i: p.untyped_storage().copy_(other(i).untyped_storage()),
    storage_fill_=lambda p, _: p.untyped_storage().fill_(0),
    version_preserved=lambda p, _: _mul_preserving_version(p),
    multiplied_in_inference_mode=lambda p, _: torch.inference_mode()(p.data.mul_)(1.5),
    copied_by_a_thread=lambda p, i: _in_thread(lambda: p.data.copy_(other(i))),
    written_in_a_fork_of_storage=lambda p, _: torch.as_strided(p.data, (2,), (1,), 3).mul_(1.5),
)
_each(
    "place",
    transpose_in_place=lambda p, _: p.t_(),
    set_=lambda p, i: p.set_(other(i)),
    data_replaced=lambda p, i: setattr(p, "data", other(i)),
    data_transposed=lambda p, _: setattr(p, "data", p.data.t()),
    data_transposed_and_written=lambda p, _: setattr(p, "data", p.data.t().mul_(1.5)),
    data_cloned_and_scaled=lambda p, _: setattr(p, "data", p.data * 1.5),
)


def _mul_preserving_version(parameter: nn.Parameter) -> None:
    with torch.autograd._unsafe_preserve_version_counter(parameter):  # type: ignore[attr-defined]
        parameter.mul_(1.5)


def _memmove(parameter: nn.Parameter, source: torch.Tensor) -> None:
    ctypes.memmove(parameter.data_ptr(), source.data_ptr(), 4 * COUNT)


def _in_thread(change: Callable[[], Any]) -> None:
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()


@_write("place")
def parameter_replaced(net: Net, i: int) -> None:
    net.a.weight = nn.Parameter(other(i))


@_write("place")
def layers_swapped(net: Net, i: int) -> None:  # noqa: ARG001
    net.a.weight, net.b.weight = net.b.weight, net.a.weight


@_write("place")
def data_swapped_inside(net: Net, i: int) -> None:  # noqa: ARG001
    net.a.weight.data, net.b.weight.data = net.b.weight.data, net.a.weight.data


@_write("storage")
def load_state_dict(net: Net, i: int) -> None:
    net.load_state_dict(make_net(i + 1).state_dict())


@_write("place")
def load_state_dict_assign(net: Net, i: int) -> None:
    net.load_state_dict(make_net(i + 1).state_dict(), assign=True)


@_write("place")
def to_float64(net: Net, i: int) -> None:
    """And back on the next step."""
    net.to(torch.float64 if i % 2 == 0 else torch.float32)
    net.a.weight.data.mul_(1.5)


@_write("place")
def to_half_and_back(net: Net, i: int) -> None:  # noqa: ARG001
    net.half().float()
    net.a.weight.data.mul_(1.25)


class Subclass(torch.Tensor):
    """Tensor subclass that changes nothing."""


@_write("place")
def becomes_a_subclass_and_plain_again(net: Net, i: int) -> None:
    weight = net.a.weight.detach().mul(1.5)
    weight = weight.as_subclass(Subclass if i % 2 else torch.Tensor)
    net.a.weight = nn.Parameter(weight)


@_write("place")
def to_meta_and_back(net: Net, i: int) -> None:  # noqa: ARG001
    values = {name: value.mul(1.5) for name, value in net.state_dict().items()}
    net.to("meta").to_empty(device="cpu")
    net.load_state_dict(values)


@_write("place")
def set_to_a_part(net: Net, i: int) -> None:
    flat = other(i, 3 * SIZE, SIZE)
    net.a.weight.set_(flat.untyped_storage(), SIZE, (SIZE, SIZE), (SIZE, 1))


@_write("place")
def resized_and_written(net: Net, i: int) -> None:
    net.a.weight.data.resize_(2 * SIZE, SIZE)
    net.a.weight.data.resize_(SIZE, SIZE)
    net.a.weight.data.copy_(other(i))


@_write("storage")
def storage_grown(net: Net, i: int) -> None:  # noqa: ARG001
    storage = net.a.weight.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    net.a.weight.data.mul_(1.5)


@_write("place")
def layers_grown(net: Net, i: int) -> None:
    """Other sizes under the same parameters, and back."""
    size = SIZE * (1 + i % 2)
    net.a.weight.data, net.a.bias.data = other(i, size, SIZE), other(i, size)
    net.b.weight.data = other(i, SIZE, size)


@_write("place")
def pruned_and_not(net: Net, i: int) -> None:  # noqa: ARG001
    if prune.is_pruned(net.a):
        prune.remove(net.a, "weight")  # type: ignore[no-untyped-call]
        net.a.weight.data.mul_(1.5)
    else:
        prune.l1_unstructured(net.a, "weight", amount=0.5)  # type: ignore[no-untyped-call]
        net.a.weight_orig.data.mul_(1.5)  # type: ignore[operator]


@_write("storage")
def vector_to_parameters(net: Net, i: int) -> None:
    vector = other(i, sum(p.numel() for p in net.parameters()))
    nn.utils.vector_to_parameters(vector, net.parameters())


@_write("place")
def share_memory(net: Net, i: int) -> None:
    net.share_memory()
    net.a.weight.data.copy_(other(i))


@_write("storage")
def storage_freed_and_allocated(net: Net, i: int) -> None:
    """As sharded training does between layers."""
    parameter = net.a.weight
    parameter.data_ptr()  # a storage that is copy-on-write cannot be resized in torch 2.13
    parameter.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(4 * COUNT)
    parameter.data.copy_(other(i))


@_write("storage")
def requires_grad_toggled(net: Net, i: int) -> None:
    net.a.weight.requires_grad_(i % 2 == 1)
    net.a.weight.data.mul_(1.5)


@_write("storage")
def bias_only(net: Net, i: int) -> None:
    net.a.bias.data.copy_(other(i, SIZE))


@_write("storage")
def everything(net: Net, i: int) -> None:
    for parameter in net.parameters():
        parameter.data.copy_(other(i, *parameter.shape))


@_prepared("storage")
def averages_swapped_in_and_out(net: Net) -> Step:
    """An exponential average of the weights for evaluation, the weights for training."""
    average = {name: p.detach().clone() * 1.5 for name, p in net.named_parameters()}
    kept: dict[str, torch.Tensor] = {}

    def step(_: int) -> None:
        is_average = bool(kept)
        for name, parameter in net.named_parameters():
            if is_average:
                parameter.data.copy_(kept.pop(name))
            else:
                kept[name] = parameter.detach().clone()
                parameter.data.copy_(average[name])

    return step


@_prepared("place")
def averages_swapped_by_pointer(net: Net) -> Step:
    """No byte of any storage changes: only which storage a weight has."""
    average = {name: p.detach().clone() * 1.5 for name, p in net.named_parameters()}

    def step(_: int) -> None:
        for name, parameter in net.named_parameters():
            parameter.data, average[name] = average[name], parameter.data

    return step


@_prepared("place")
def double_buffer(net: Net) -> Step:
    """Two slices of one flat buffer by turns, the idle one written in between."""
    flat = torch.cat([net.a.weight.detach().reshape(-1), other(0).reshape(-1)])
    halves = [flat[:COUNT].view(SIZE, SIZE), flat[COUNT:].view(SIZE, SIZE)]
    net.a.weight.data = halves[0]

    def step(i: int) -> None:
        idle = halves[(i + 1) % 2]
        idle.copy_(other(i))
        net.a.weight.data = idle

    return step


@_prepared("place")
def slices_swapped(net: Net) -> Step:
    """Two slices of one flat buffer by turns: neither the storage nor a byte of it changes."""
    flat = torch.cat([net.a.weight.detach().reshape(-1), other(0).reshape(-1)])
    halves = [flat[:COUNT].view(SIZE, SIZE), flat[COUNT:].view(SIZE, SIZE)]
    net.a.weight.data = halves[0]

    def step(i: int) -> None:
        net.a.weight.data = halves[(i + 1) % 2]

    return step


@_prepared("storage")
def flat_buffer(net: Net) -> Step:
    """All parameters lie in one buffer, which is written as a whole."""
    flat = _flattened(net)

    def step(_: int) -> None:
        flat.mul_(1.5)

    return step


@_prepared("storage")
def neighbour_in_flat_buffer(net: Net) -> Step:
    """All parameters lie in one buffer; the second weight alone is written."""
    _flattened(net)

    def step(_: int) -> None:
        net.b.weight.data.mul_(1.5)

    return step


def _flattened(net: Net) -> torch.Tensor:
    flat = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    start = 0
    for parameter in net.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


@_prepared("place")
def one_storage_for_both(net: Net) -> Step:
    """Two weights share memory when a graph is compiled, until one gets other data."""
    net.b.weight.data = net.a.weight.data

    def step(i: int) -> None:
        net.b.weight.data = other(i)

    return step


@_prepared("storage")
def neighbour_of_another_model(net: Net) -> Step:
    """A weight of each of two models lies in one buffer; both have cached values."""
    rival, call = _compiled_rival()
    flat = torch.cat([net.a.weight.detach(), rival.a.weight.detach()])
    net.a.weight.data, rival.a.weight.data = flat[:SIZE], flat[SIZE:]

    def step(i: int) -> None:
        (net, rival)[i % 2].a.weight.data.mul_(-1.5)
        call()

    return step


def _parametrized(name: str) -> None:
    def prepare(net: Net) -> Step:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            getattr(parametrizations, name)(net.a.eval())

        def step(_: int) -> None:
            for parameter in net.a.parametrizations.weight.parameters():  # type: ignore[union-attr]
                parameter.data.mul_(1.25)

        return step

    _add(name, prepare, "storage")


for each in ("weight_norm", "orthogonal", "spectral_norm"):
    _parametrized(each)


@_prepared("storage")
def partly_frozen(net: Net) -> Step:
    net.a.requires_grad_(requires_grad=False)
    return functools.partial(_scale, net)


@_prepared("storage")
def mapped_file(net: Net) -> Step:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(make_net(3).state_dict(), file.name)
        net.load_state_dict(torch.load(file.name, mmap=True), assign=True)
    return functools.partial(_scale, net)


def _scale(net: Net, _: int) -> None:
    net.a.weight.data.mul_(1.5)


@_prepared("place")
def buffer(net: Net) -> Step:
    """The weight is a buffer, which is written or replaced."""
    weight = net.a.weight.detach().clone()
    del net.a.weight
    net.a.register_buffer("weight", weight)

    def step(i: int) -> None:
        if i % 2:
            net.a.weight = other(i)
        else:
            net.a.weight.copy_(other(i))

    return step


@_prepared("storage")
def numpy_backed(net: Net) -> Step:
    """Weights over a NumPy array, which is written: nothing in PyTorch sees it."""
    array = net.a.weight.detach().clone().numpy().copy()
    net.a.weight.data = torch.from_numpy(array)

    def step(_: int) -> None:
        array.__imul__(1.5)

    return step


@_prepared("place")
def swapped_with_another_model(net: Net) -> Step:
    """Two models exchange the storages of their weights; both have cached values."""
    rival, call = _compiled_rival()

    def step(_: int) -> None:
        net.a.weight.data, rival.a.weight.data = rival.a.weight.data, net.a.weight.data
        call()

    return step


def _compiled_rival() -> tuple[Net, Callable[[], Any]]:
    rival = make_net(9)
    compiled = torch.no_grad()(compile_amp_fx(rival))
    compiled(inputs())
    return rival, lambda: compiled(inputs())


def _compiled_write(name: str, compile_write: Callable[[Any], Any]) -> None:
    def prepare(net: Net) -> Step:
        def change(weight: torch.Tensor, scale: torch.Tensor) -> None:
            with torch.no_grad():
                weight.mul_(scale)

        compiled = compile_write(change)
        return lambda _: compiled(net.a.weight, torch.tensor(1.5))

    _add(name, prepare, "storage")


_compiled_write("compiled_eager", lambda f: torch.compile(f, backend="eager"))
_compiled_write("compiled_aot_eager", lambda f: torch.compile(f, backend="aot_eager"))
_compiled_write(
    "compiled_by_amp_fx",
    lambda f: torch.compile(f, backend="amp_fx", options={"compiler": "eager"}),
)


# Signals that nothing but CUDA's kernels, or pointers, leave alone on the CPU.


@_write("version")
def by_an_alias_with_the_version(net: Net, i: int) -> None:  # noqa: ARG001
    """As kernels do that ask no storage, but say that they write the tensor."""
    version = net.a.weight._version
    alias(net.a.weight.detach()).mul_(1.5)
    torch._C._autograd._unsafe_set_version_counter((net.a.weight,), (version + 1,))


@_write("list op")
def list_as_on_cuda(net: Net, i: int) -> None:  # noqa: ARG001
    with cuda_like():
        torch._foreach_mul_([net.a.weight.data], 1.5)


class _WritesUnseen(torch.optim.Optimizer):
    """Its own kernel writes through pointers, as torch's do not."""

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                alias(parameter.detach()).mul_(1.5)


@_prepared("step")
def optimizer_with_a_kernel_of_its_own(net: Net) -> Step:
    optimizer = _WritesUnseen(net.parameters(), {})
    return lambda _: optimizer.step()


def _taken_before(name: str, alias_of: Callable[[torch.Tensor], Any]) -> None:
    """Registers a write through an alias from before the first call."""

    def prepare(net: Net) -> Step:
        alias = alias_of(net.a.weight.detach())

        def step(_: int) -> None:
            alias.__imul__(1.5)

        return step

    _add(name, prepare, "sample")


def _array_of(weight: torch.Tensor) -> Any:
    pointer = ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, (weight.numel(),))


_taken_before("array_taken_before", torch.Tensor.numpy)
_taken_before("dlpack_taken_before", from_dlpack)
_taken_before("pointer_taken_before", _array_of)


@_prepared("sample")
def part_of_an_array(net: Net) -> Step:
    """The weight has some elements of a larger tensor, over which there is an array."""
    whole = random(3 * SIZE, 2 * SIZE, seed=5)
    net.a.weight.data = whole[1::3, ::2]
    array = whole.numpy()

    def step(_: int) -> None:
        array[1::3] *= 1.5

    return step


@_write("sample")
def alias_that_nobody_watches(net: Net, i: int) -> None:  # noqa: ARG001
    alias(net.a.weight.detach()).mul_(1.5)
