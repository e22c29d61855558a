"""CUDA tensors that lie in the host's memory, and ops on them that the CPU's kernels compute.

A tensor made here is a CUDA tensor for all of torch: its device and dispatch keys are CUDA's, so
that autocast, autograd, Dynamo and inductor treat it as such. Its storage is a real one, which can
be watched for writes. Only the bytes are the host's (``memory.cpp``). In the place of each of
CUDA's kernels stands one that runs the CPU's kernel over the same bytes.

What CUDA does otherwise than the CPU is taken from torch's own description of CUDA's ops, their
fake kernels: dtypes and strides of results follow those. How results are rounded is the CPU's
matter. Kernels run at once: streams order nothing, and every event has happened.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from amp_fx.csrc import build
from tests.cuda import cuda_only
from tests.weights.cuda_like import LIST_WRITES

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("memory.cpp")
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
not_compiled: Any = torch.compiler.disable


@functools.cache
def library() -> Any:
    """Loads the ops of ``memory.cpp``, which are built on first use."""
    name = "amp_fx_host_memory"
    built = build.find(name, SOURCE) or build.start(name, SOURCE).result()
    torch.ops.load_library(built)  # type: ignore[no-untyped-call]
    return torch.ops.amp_fx_host_memory


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor that shares the bytes of a CUDA tensor, without marking a write."""
    shown: torch.Tensor = library().on_host(tensor.detach())
    return shown


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CUDA tensor over the bytes of a CPU tensor."""
    shown: torch.Tensor = library().on_cuda(tensor.detach())
    return shown


class Random:
    """The random numbers of the device, in the order in which its ops draw them."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(0).get_state()

    def seed(self, seed: int) -> None:
        """Starts again from a seed."""
        self.state = torch.Generator().manual_seed(seed).get_state()

    def get(self, *_: Any) -> torch.Tensor:
        """Returns the state, as ``torch.cuda.get_rng_state`` gives it."""
        return self.state.clone()

    def set(self, state: torch.Tensor, *_: Any) -> None:
        """Goes on from a state."""
        self.state = state.clone()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """The CPU's kernels draw these numbers, and the host's stay where they are."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        try:
            yield
        finally:
            self.state = torch.default_generator.get_state()
            torch.default_generator.set_state(before)


RANDOM = Random()


WAITING = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})
"""Ops of which the host needs numbers to go on, beside copies."""


def _tell_of_waiting() -> None:
    """Warns or raises as ``torch.cuda.set_sync_debug_mode`` asks for."""
    mode = torch.cuda.get_sync_debug_mode()
    if mode == 1:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    elif mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")


CAPTURES: list[Any] = []
"""The graph that is captured (``user_graphs.py``); none or one."""

_replays: list[None] = []


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Disables the recording of writes by kernels."""
    _replays.append(None)
    try:
        yield
    finally:
        _replays.pop()


class Kernel:
    """In the place of one of CUDA's kernels: computes an op of CUDA tensors on the host.

    Args:
        op: The op.
    """

    def __init__(self, op: Any) -> None:
        self.op = op
        self.compute = cuda_only.computed_by(op)
        self.is_seeded = torch.Tag.nondeterministic_seeded in op.tags
        asks = op is not torch.ops.aten.record_stream.default  # its kernel takes a const pointer
        self.notes_writes = asks and not LIST_WRITES.match(op.name())
        arguments = op._schema.arguments
        self.tensors = {i for i, a in enumerate(arguments) if str(a.type) == "Tensor"}
        self.written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        self.names = [a.name for a in arguments]
        self.has_new_results = any(r.alias_info is None for r in op._schema.returns)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the op."""
        if self._waits(args, kwargs):
            _tell_of_waiting()
        for graph in CAPTURES:
            graph.save(self._written(args, kwargs))
        found = self._run(args, kwargs)
        for graph in CAPTURES:
            graph.note(self._run, (args, kwargs), {}, found)
        return found

    def _run(self, args: Any, kwargs: Any) -> Any:
        with unwatched():
            call = _Call(args, kwargs)
            if self.notes_writes and not _replays:
                call.note_writes(self._written(args, kwargs))
            with RANDOM.drawing() if self.is_seeded else contextlib.nullcontext():
                found = self._found(call)
            call.adopt_resized()
            wanted = self._wanted(args, kwargs) if self.has_new_results else None
            return call.on_device(found, wanted)

    def _waits(self, args: Any, kwargs: Any) -> bool:
        """Returns True if the host waits for CUDA's kernel: a read of numbers or blocking copy."""
        if self.op is not torch.ops.aten.copy_.default:
            return self.op in WAITING
        target, source = args[:2]
        is_queued = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return target.device != source.device and not is_queued

    def _found(self, call: _Call) -> Any:
        """Computes the results on the host, in float32 if the CPU has no low kernel."""
        if self._has_plain_number(call.args):
            return self.op.overloadpacket(*call.args, **call.kwargs)
        try:
            return self.compute(*call.args, **call.kwargs)
        except RuntimeError as error:
            if not cuda_only.lacks_low_kernel(error):
                raise
        args, kwargs = tree_map_only(torch.Tensor, _widened, (call.args, call.kwargs))
        found = self.compute(*args, **kwargs)
        narrow = self._written(call.args, call.kwargs)
        wide = self._written(args, kwargs)
        for low, result in zip(tree_flatten(narrow)[0], tree_flatten(wide)[0], strict=True):
            if isinstance(low, torch.Tensor):
                low.copy_(result)
        is_in_place = bool(self.written) and not self.has_new_results
        return (narrow[0] if len(narrow) == 1 else tuple(narrow)) if is_in_place else found

    def _has_plain_number(self, args: Any) -> bool:
        """Returns True if torch unwrapped a number that the op takes as a tensor."""
        given = [i for i in self.tensors if i < len(args)]
        return any(isinstance(args[i], (int, float, complex)) for i in given)

    def _written(self, args: Any, kwargs: Any) -> list[Any]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return [given[name] for name in self.written if name in given]

    def _wanted(self, args: Any, kwargs: Any) -> list[Any] | None:
        """Results as torch says that CUDA makes them; None if it does not say."""
        if torch.Tag.data_dependent_output in self.op.tags:
            return None
        key = self.op, _description((args, kwargs))
        if key not in _described:
            _described[key] = _fake_results(self.op, args, kwargs)
        return _described[key]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


_described: dict[Any, list[Any] | None] = {}


def _description(tree: Any) -> Any:
    """Returns a key of everything that a fake kernel can see of the arguments."""
    leaves, spec = tree_flatten(tree)
    seen = [
        ("tensor", x.dtype, x.device.type, tuple(x.size()), x.stride(), x.storage_offset())
        if isinstance(x, torch.Tensor)
        else (type(x), repr(x))
        for x in leaves
    ]
    return tuple(seen), str(spec)


def _fake_results(op: Any, args: Any, kwargs: Any) -> list[Any] | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def sized(tensor: torch.Tensor) -> torch.Tensor:
        reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
        reach = 0 if tensor.numel() == 0 else reach + 1
        made = torch.empty(reach, dtype=tensor.dtype, device=tensor.device)
        return made.as_strided(tensor.size(), tensor.stride(), 0)

    try:
        with mode:
            fakes = tree_map_only(torch.Tensor, sized, (args, kwargs))
            results = tree_flatten(op(*fakes[0], **fakes[1]))[0]
            return [
                (x.dtype, x.device, tuple(x.size()), x.stride())
                if isinstance(x, torch.Tensor)
                else None
                for x in results
            ]
    except Exception:  # noqa: BLE001, no fake kernel, or one that needs numbers
        return None


class _Call:
    """The arguments of one call, on the host, and the way back."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.sources: dict[int, torch.Tensor] = {}
        self.hosts: list[torch.Tensor] = []
        self.resized: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.device: torch.device | None = None
        leaves, spec = tree_flatten((args, dict(kwargs)))
        self.args, self.kwargs = tree_unflatten([self._on_host(leaf) for leaf in leaves], spec)
        self.kwargs.pop("pin_memory", None)

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            self.device = leaf
            return CPU
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cuda":
            return leaf
        host = on_host(leaf)
        if leaf.numel() == 0 and leaf.untyped_storage().nbytes() == 0:
            host = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
            self.resized.append((leaf, host))
        self.sources[id(host)] = leaf
        self.hosts.append(host)
        return host

    def note_writes(self, written: list[Any]) -> None:
        """Notifies the watches of storages as CUDA's kernels would."""
        for leaf in tree_flatten(written)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                library().note_write(leaf)

    def adopt_resized(self) -> None:
        """Gives memory to tensors that had none, and that the op made larger."""
        for leaf, host in self.resized:
            if host.size() != leaf.size():
                leaf.set_(on_cuda(host))  # type: ignore[call-overload]

    def on_device(self, found: Any, wanted: list[Any] | None) -> Any:
        """Returns the results, on the device and as it makes them."""
        leaves, spec = tree_flatten(found)
        if wanted is None or len(wanted) != len(leaves):
            wanted = [None] * len(leaves)
        made = [self._result(leaf, as_) for leaf, as_ in zip(leaves, wanted, strict=True)]
        return tree_unflatten(made, spec)

    def _result(self, leaf: Any, wanted: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self.sources:
            return self.sources[id(leaf)]
        if wanted is None:
            is_cuda = bool(self.sources) if self.device is None else self.device.type == "cuda"
            return self._moved(leaf) if is_cuda else leaf
        dtype, device, size, strides = wanted
        if tuple(leaf.size()) == size and (leaf.dtype, leaf.stride()) != (dtype, strides):
            leaf = torch.empty_strided(size, strides, dtype=dtype).copy_(leaf)
        return self._moved(leaf) if device.type == "cuda" else leaf

    def _moved(self, leaf: torch.Tensor) -> torch.Tensor:
        """On the device; a view of an argument stays one."""
        for host in self.hosts:
            if leaf.numel() and library().is_same_memory(leaf, host):
                source = self.sources[id(host)].detach()
                if leaf.dtype != source.dtype:
                    source = source.view(leaf.dtype)
                return source.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
        return on_cuda(leaf)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Neither autograd nor autocast of the CPU sees what is computed on the host."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys):
        yield


def install() -> None:
    """Puts the host's kernels in the place of CUDA's, for the rest of the process.

    Relies on ``torch._C._dispatch_get_registrations_for_dispatch_key``.
    """
    made = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that a kernel is replaced
        for name in sorted({*names, *cuda_only.COMPOSED}):
            if name.startswith("aten::") and not _stays(op_of(name)):
                # Dynamo would compile what eager code calls between two graphs.
                kernel: Any = not_compiled(Kernel(op_of(name)).run)
                plain = name.removeprefix("aten::")
                made.impl(plain, kernel, "CUDA", allow_override=True)  # type: ignore[no-untyped-call]
    keep(made)


def keep(library: Any) -> None:
    """Keeps a library, whose kernels would go with it."""
    _kept.append(library)


_kept: list[Any] = []


def op_of(name: str) -> Any:
    """Returns the op of a registration, as ``aten::add.out``."""
    plain, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, plain), overload or "default")


def _stays(op: Any) -> bool:
    """Returns True if CUDA's kernel touches no bytes itself, and can be left in place."""
    return op.is_view or op.name() in cuda_only.LEFT
