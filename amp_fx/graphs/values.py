"""Evaluates single nodes on fake tensors, to learn what they really produce.

``VALUE`` is the value of a node after rewriting, ``CAPTURED`` the one that Dynamo captured.
Nodes are evaluated with autocast off, because casts are nodes, and in graph order, so that
in-place ops raise the version of what they write.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from amp_fx.graphs.metadata import CAPTURED, EXAMPLE_VALUE, VALUE, VERSION
from amp_fx.policies.calls import bind, written_arguments
from amp_fx.regions.state import no_autocast
from amp_fx.torch_private import pytree
from amp_fx.torch_private.autograd import saved_tensors_hooks_tracing
from amp_fx.torch_private.fake_tensors import FakeTensor, enable_python_dispatcher
from amp_fx.torch_private.modes import TorchDispatchMode
from amp_fx.torch_private.ops import OpOverload, OpOverloadPacket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amp_fx.torch_private.fake_tensors import FakeTensorMode


def is_symbolic(value: Any) -> bool:
    """Returns True if a size, or one of a tensor's sizes, strides and its offset, is symbolic."""
    from torch.fx.experimental.symbolic_shapes import free_symbols  # sympy takes 0.3 s

    return bool(free_symbols(value))


def is_unbacked(value: Any) -> bool:
    """Returns True if a size, or one of a tensor's, follows from data that the graph computes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def captured_value(node: fx.Node) -> Any:
    """Returns what Dynamo (``example_value``) or ``torch.export`` (``val``) recorded, or None."""
    return CAPTURED.get(node)


def captured_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype of a captured tensor; None for what is none, and for float8."""
    value = captured_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    is_float8 = value.is_floating_point() and value.itemsize == 1
    return None if is_float8 else value.dtype


def remember_captured(graph: fx.Graph) -> None:
    """Keeps what capture recorded under ``CAPTURED``, once, for all nodes."""
    for node in graph.nodes:
        if not CAPTURED.is_on(node):
            CAPTURED.put(node, recorded_value(node))


def recorded_value(node: fx.Node) -> Any:
    """Returns what capture left in the metadata, before anything was rewritten."""
    return (EXAMPLE_VALUE if EXAMPLE_VALUE.is_on(node) else VALUE).get(node)


def set_value(node: fx.Node, value: Any) -> None:
    """Records what a node produces, and the version that it has there (``version_of``).

    ``example_value`` is kept equal: AOTAutograd's cache takes a method call on a node
    for one on a tensor only where that key is present.
    """
    VALUE.put(node, value)
    if isinstance(value, torch.Tensor):
        VERSION.put(node, version_of(value))
    if value is not None:
        EXAMPLE_VALUE.put(node, value)


def value_of(node: fx.Node) -> Any:
    """The value recorded by ``set_value``."""
    return VALUE.get(node)


def argument_values(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments with every node replaced by its value."""
    args, kwargs = values_in((node.args, node.kwargs))
    return args, kwargs


def values_in(args: Any) -> Any:
    """Nested arguments with every node replaced by its value."""
    return map_arg(args, value_of)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments, in order."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_aggregate(values, collect)
    return found


def call_target(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls what a ``call_function`` or ``call_method`` node calls."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def call_on_fakes(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls what a node calls, on fake tensors.

    The Python dispatcher, under which torch traces, is used where the call fails without it: some
    C++ kernels take no symbolic sizes (``upsample_*.vec``), others read numbers (``one_hot`` in
    ``torch.func.grad``). It is not used elsewhere, because its decompositions are not what eager
    code runs: ``dropout`` copies its input where eager code returns the input itself.
    """
    try:
        return call_target(node, args, kwargs)
    except Exception:
        with contextlib.suppress(Exception), enable_python_dispatcher():
            return call_target(node, args, kwargs)
        raise


def detect_fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode of the captured values (Dynamo's own, not the tracing context's)."""
    for node in graph.nodes:
        for tensor in tensors_in(captured_value(node)):
            mode = getattr(tensor, "fake_mode", None)
            if mode is not None:
                return mode  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def analysis(
    fake_mode: FakeTensorMode | None, *, is_grad_enabled: bool, records_writes: bool = False
) -> Iterator[None]:
    """Sets up the evaluation of nodes: fake tensors, autocast off, the program's grad mode."""
    with contextlib.ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(fake_mode)
            if fake_mode.shape_env is not None:
                stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
            if records_writes:
                stack.enter_context(_WriteRecorder(fake_mode))
        stack.enter_context(_without_warnings())
        stack.enter_context(saved_tensors_hooks_tracing())
        stack.enter_context(no_autocast())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
        yield


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """The user's program warns when it runs; evaluating its nodes must not repeat that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def without_meta_errors() -> Iterator[None]:
    """Keeps torch from logging this thread's ops that fail on fake tensors: the error says it."""
    thread = threading.get_ident()
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.ERROR

    log.addFilter(is_kept)
    try:
        yield
    finally:
        log.removeFilter(is_kept)


_num_writes: WeakKeyDictionary[FakeTensorMode, Counter[int]] = WeakKeyDictionary()

_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
)
"""In training they write arguments 3 and 4, the running statistics; their schemas do not say so."""


class _WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts writes per storage, those through ``.data`` and detached aliases included."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = _num_writes.setdefault(fake_mode, Counter())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _BATCH_NORMS and args[5]:
            self._counts.update(storage_id(t) for t in args[3:5] if t is not None)
        if func._schema.is_mutable:
            given = bind(func, args, kwargs)
            written = [given.get(name) for name in written_arguments(func)]
            self._counts.update(map(storage_id, tensors_in(written)))
        return func(*args, **kwargs)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a key that is equal for tensors that share memory; each sparse tensor is alone."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Changes whenever a tensor is written to; None for inference tensors.

    The version counter does not see writes to ``.data``, the recorder of ``analysis`` does.
    """
    if tensor.is_inference():
        return None
    fake_mode: FakeTensorMode | None = getattr(tensor, "fake_mode", None)
    if fake_mode is None:
        return tensor._version, 0
    return tensor._version, _num_writes.get(fake_mode, _NO_WRITES)[storage_id(tensor)]


_NO_WRITES: Counter[int] = Counter()


def is_dynamic(value: Any) -> bool:
    """Returns True if an input is a number, or a tensor whose shape is symbolic."""
    return not isinstance(value, torch.Tensor) or is_symbolic(value)


def is_written(placeholder: fx.Node) -> bool:
    """Returns True if the graph writes to one of its inputs, as the walk of its nodes saw it."""
    value = value_of(placeholder)
    if not isinstance(value, torch.Tensor):
        return False
    version = version_of(value)
    return version is None or version != VERSION.of(placeholder)


def evaluate(node: fx.Node) -> Any:
    """The value of one call node from the values of its arguments, inside ``analysis``."""
    args, kwargs = argument_values(node)
    value = call_on_fakes(node, args, kwargs)
    if _is_custom_op(node.target):
        value = _apart_from(tensors_in(args, kwargs), value)
    return adopt_captured(captured_value(node), value)


def _is_custom_op(target: Any) -> bool:
    """Returns True for ops that are neither PyTorch's nor amp_fx's, and alias no argument."""
    op = getattr(target, "default", target) if isinstance(target, OpOverloadPacket) else target
    if not isinstance(op, OpOverload) or op.namespace in ("aten", "prims", "amp_fx"):
        return False
    return all(each.alias_info is None for each in op._schema.returns)


def _apart_from(given: Sequence[torch.Tensor], value: Any) -> Any:
    """Returns results with memory of their own.

    A fake kernel may return its argument where the real one computes a new tensor. The result
    would pass for the argument, say for a weight.
    """
    known = {storage_id(tensor) for tensor in given}

    def apart(leaf: Any) -> Any:
        is_given = isinstance(leaf, torch.Tensor) and storage_id(leaf) in known
        return leaf.clone() if is_given else leaf

    return pytree.tree_map(apart, value)


def adopt_captured(captured: Any, value: Any) -> Any:
    """A fresh value, with everything but dtypes taken from capture where it has to be.

    Sizes that depend on data get a new symbol at each evaluation; only the captured one
    has a source. Dtypes do not change sizes, so the captured tensor in the fresh dtype
    is the value. Numbers and symbols are taken as captured for the same reason.
    """
    if captured is None or value is None:
        return value
    if isinstance(captured, torch.Tensor) and isinstance(value, torch.Tensor):
        return captured.to(value.dtype) if is_unbacked(captured) else value
    if isinstance(captured, (tuple, list)) and isinstance(value, (tuple, list)):
        if len(captured) == len(value) and tensors_in(captured):
            leaves, spec = pytree.tree_flatten(value)
            old = pytree.tree_leaves(captured)
            if len(old) == len(leaves):
                pairs = zip(old, leaves, strict=True)
                return pytree.tree_unflatten([adopt_captured(o, v) for o, v in pairs], spec)
        return value
    return value if isinstance(value, torch.Tensor) else captured


def dtypes_differ(left: Any, right: Any) -> bool:
    """Returns True if two nested values hold tensors of different dtypes at any place."""
    ours, theirs = tensors_in(left), tensors_in(right)
    if len(ours) != len(theirs):
        return bool(ours) and bool(theirs)
    return any(a.dtype != b.dtype for a, b in zip(ours, theirs, strict=True))


def plain_inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """Inputs with fake tensors replaced by empty ones on ``meta`` that share their storages.

    Fake weights stand for plain ones: nobody can keep the casts of the former in earnest.
    """
    return [_plain(x) if isinstance(x, FakeTensor) else x for x in example_inputs]


def _plain(fake: FakeTensor) -> torch.Tensor:
    if fake.layout is not torch.strided:
        return fake
    plain = torch.empty(0, dtype=fake.dtype, device="meta")
    plain.set_(fake.untyped_storage(), fake.storage_offset(), fake.size(), fake.stride())
    is_parameter = isinstance(fake, torch.nn.Parameter)
    return torch.nn.Parameter(plain, fake.requires_grad) if is_parameter else plain
