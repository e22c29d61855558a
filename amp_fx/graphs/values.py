"""Evaluates nodes on fake tensors.

``VALUE`` is the value of a node after rewriting; ``CAPTURED`` is the value that Dynamo recorded.
Nodes are evaluated with autocast off, because casts are nodes of the graph. They are evaluated in
graph order, so that in-place ops increase the versions of the tensors that they write.
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
from amp_fx.torch_private.autograd import disable_saved_tensors_hooks
from amp_fx.torch_private.fake_tensors import FakeTensor, enable_python_dispatcher
from amp_fx.torch_private.modes import TorchDispatchMode
from amp_fx.torch_private.ops import OpOverload, OpOverloadPacket, returns_alias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.torch_private.fake_tensors import FakeTensorMode


def is_symbolic(value: Any) -> bool:
    """Returns True if a number, or a size, stride or the offset of a tensor, is symbolic."""
    from torch.fx.experimental.symbolic_shapes import free_symbols  # sympy takes 0.3 s

    return bool(free_symbols(value))


def is_unbacked(value: Any) -> bool:
    """Returns True if a number, or a size of a tensor, depends on data that the graph computes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def captured_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype of a captured tensor; None for non-tensors and float8 tensors."""
    value = CAPTURED.get(node)
    if not isinstance(value, torch.Tensor):
        return None
    is_float8 = value.is_floating_point() and value.itemsize == 1
    return None if is_float8 else value.dtype


def remember_captured(graph: fx.Graph) -> None:
    """Copies the captured values to ``CAPTURED`` for all nodes that lack it."""
    for node in graph.nodes:
        if not CAPTURED.is_on(node):
            CAPTURED.put(node, recorded_value(node))


def recorded_value(node: fx.Node) -> Any:
    """Returns the value in the metadata of a node that was not rewritten."""
    return (EXAMPLE_VALUE if EXAMPLE_VALUE.is_on(node) else VALUE).get(node)


def set_value(node: fx.Node, value: Any) -> None:
    """Records the value of a node, and its current version (``version_of``)."""
    VALUE.put(node, value)
    if isinstance(value, torch.Tensor):
        VERSION.put(node, version_of(value))
    # AOTAutograd's cache accepts method calls only on nodes with this key.
    if value is not None:
        EXAMPLE_VALUE.put(node, value)


def argument_values(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a node with every node replaced by its value."""
    args, kwargs = map_arg((node.args, node.kwargs), VALUE.get)
    return args, kwargs


def values_in(args: Any) -> Any:
    """Returns nested arguments with every node replaced by its value."""
    return map_arg(args, VALUE.get)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Returns all tensors in nested arguments, in order."""
    leaves: list[Any] = []
    map_aggregate(values, leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def call_target(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the target of a ``call_function`` or ``call_method`` node."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def call_on_fakes(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the target of a node on fake tensors."""
    try:
        return call_target(node, args, kwargs)
    except RejectedMixtureError:
        raise
    except Exception:
        # Some C++ kernels accept no symbolic sizes (``upsample_*.vec``), others read numbers
        # (``one_hot`` in ``torch.func.grad``). Tracing works with the Python dispatcher. It is
        # only used after a failure, because its decompositions differ from eager kernels:
        # ``dropout`` copies its input where the eager kernel returns the input itself.
        with contextlib.suppress(Exception), enable_python_dispatcher():
            return call_target(node, args, kwargs)
        raise


def detect_fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """Returns the fake mode of the captured values (Dynamo's, not that of the tracing context)."""
    for node in graph.nodes:
        for tensor in tensors_in(CAPTURED.get(node)):
            mode = getattr(_inner(tensor), "fake_mode", None)
            if mode is not None:
                return mode  # type: ignore[no-any-return]
    return None


def _inner(tensor: Any) -> Any:
    """Returns a tensor inside of a subclass, which is fake while the subclass is not."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    names, _ = tensor.__tensor_flatten__()
    return _inner(getattr(tensor, names[0]))


class RejectedMixtureError(Exception):
    """Raised by the ``check`` of ``analysis`` for an op that does not accept its dtypes.

    Attributes:
        written: Arguments that the op writes to, which must not be replaced by casts.
    """

    def __init__(self, message: str, written: Sequence[torch.Tensor]) -> None:
        super().__init__(message)
        self.written = written


@contextlib.contextmanager
def analysis(
    fake_mode: FakeTensorMode | None,
    *,
    is_grad_enabled: bool,
    records_writes: bool = False,
    check: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Context for evaluating nodes, with fake tensors, autocast off and the program's grad mode.

    Args:
        fake_mode: The fake mode of the graph's values.
        is_grad_enabled: Whether the program records gradients.
        records_writes: Whether ``version_of`` includes writes through ``.data``.
        check: Called with each ATen-level op and its arguments before the op runs; only with
            ``records_writes``.
    """
    with contextlib.ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(fake_mode)
            if fake_mode.shape_env is not None:
                # Nothing binds the symbols of a new evaluation: ``adopt_captured`` replaces them.
                stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
            if records_writes:
                stack.enter_context(_WriteRecorder(fake_mode, check))
        # The program emits its warnings when it runs.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Hooks of the program would run on fake tensors.
        stack.enter_context(disable_saved_tensors_hooks())
        # Casts are nodes of the graph, so no op may cast again.
        stack.enter_context(no_autocast())
        # Inference tensors have no versions, by which writes are found (``version_of``).
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
        yield


@contextlib.contextmanager
def hide_meta_errors() -> Iterator[None]:
    """Context in which torch does not log this thread's errors of ops on fake tensors.

    The exceptions of these ops contain the same messages.
    """
    thread = threading.get_ident()
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_logged(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.ERROR

    log.addFilter(is_logged)
    try:
        yield
    finally:
        log.removeFilter(is_logged)


# By fake mode, because each compilation has its own: the counts end with it, before another storage
# can have the same id.
_num_writes: WeakKeyDictionary[FakeTensorMode, Counter[int]] = WeakKeyDictionary()

_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
)
"""Ops that write the running statistics (arguments 3 and 4) in training, unlike their schemas say.
"""


class _WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts writes per storage, including those through ``.data`` and detached aliases.

    Calls ``check`` before each op.
    """

    def __init__(self, fake_mode: FakeTensorMode, check: Callable[..., None] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check
        # By storage: ``.data`` and ``detach()`` share the storage, but have other version counters.
        self._counts = _num_writes.setdefault(fake_mode, Counter())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._check is not None:
            self._check(func, args, kwargs)
        if func.overloadpacket in _BATCH_NORMS and args[5]:
            self._counts.update(storage_id(t) for t in args[3:5] if t is not None)
        if func._schema.is_mutable:
            arguments = bind(func, args, kwargs)
            written = [arguments.get(name) for name in written_arguments(func)]
            self._counts.update(map(storage_id, tensors_in(written)))
        return func(*args, **kwargs)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a key that is equal for strided tensors that share a storage."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns a value that changes with each write to a tensor; None for inference tensors.

    The first item is the version counter, which ignores writes through ``.data``. The second item
    counts the writes that ``analysis(records_writes=True)`` recorded.
    """
    if tensor.is_inference():
        return None
    fake_mode: FakeTensorMode | None = getattr(tensor, "fake_mode", None)
    if fake_mode is None:
        return tensor._version, 0
    return tensor._version, _num_writes.get(fake_mode, _NO_WRITES)[storage_id(tensor)]


_NO_WRITES: Counter[int] = Counter()


def is_written(placeholder: fx.Node) -> bool:
    """Returns True if the evaluation of the graph's nodes wrote to an input."""
    value = VALUE.get(placeholder)
    if not isinstance(value, torch.Tensor):
        return False
    version = version_of(value)
    return version is None or version != VERSION.of(placeholder)


def update_value(
    node: fx.Node,
    fake_mode: FakeTensorMode | None,
    *,
    is_grad_enabled: bool,
    records_writes: bool = False,
    check: Callable[..., None] | None = None,
) -> None:
    """Computes and sets the value of a call node; the arguments are those of ``analysis``."""
    with analysis(
        fake_mode, is_grad_enabled=is_grad_enabled, records_writes=records_writes, check=check
    ):
        set_value(node, evaluate(node))


def evaluate(node: fx.Node) -> Any:
    """Computes the value of a call node from the values of its arguments, inside ``analysis``."""
    args, kwargs = argument_values(node)
    value = call_on_fakes(node, args, kwargs)
    if _is_custom_op(node.target):
        value = _clone_aliases_of(tensors_in(args, kwargs), value)
    return adopt_captured(CAPTURED.get(node), value)


def _is_custom_op(target: Any) -> bool:
    """Returns True for third-party ops whose schemas declare no aliases of arguments."""
    op = getattr(target, "default", target) if isinstance(target, OpOverloadPacket) else target
    if not isinstance(op, OpOverload) or op.namespace in ("aten", "prims", "amp_fx"):
        return False
    return not returns_alias(op)


def _clone_aliases_of(arguments: Sequence[torch.Tensor], value: Any) -> Any:
    """Clones results that share a storage with an argument.

    The fake kernel of an op may return its argument although the real kernel returns a new tensor.
    Such a result would otherwise be mistaken for the argument, for example for a weight.
    """
    storages = {storage_id(tensor) for tensor in arguments}

    def without_alias(leaf: Any) -> Any:
        is_alias = isinstance(leaf, torch.Tensor) and storage_id(leaf) in storages
        return leaf.clone() if is_alias else leaf

    return pytree.tree_map(without_alias, value)


def adopt_captured(captured: Any, value: Any) -> Any:
    """Replaces data-dependent sizes of a new value by the captured ones.

    Each evaluation creates new symbols for such sizes, but only the captured symbols have sources.
    Dtypes do not change sizes, so a tensor with such sizes becomes the captured tensor in the new
    dtype. Numbers and symbols become the captured ones for the same reason.
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
    """Returns True if corresponding tensors of two nested values have different dtypes."""
    lefts, rights = tensors_in(left), tensors_in(right)
    if len(lefts) != len(rights):
        return bool(lefts) and bool(rights)
    return any(a.dtype != b.dtype for a, b in zip(lefts, rights, strict=True))


def to_meta_inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """Replaces fake inputs by meta tensors that share their storages.

    The cache accepts meta tensors as weights, but no fake tensors.
    """
    return [_plain(x) if isinstance(x, FakeTensor) else x for x in example_inputs]


def _plain(fake: FakeTensor) -> torch.Tensor:
    if fake.layout is not torch.strided:
        return fake
    plain = torch.empty(0, dtype=fake.dtype, device="meta")
    plain.set_(fake.untyped_storage(), fake.storage_offset(), fake.size(), fake.stride())
    is_parameter = isinstance(fake, torch.nn.Parameter)
    return torch.nn.Parameter(plain, fake.requires_grad) if is_parameter else plain
