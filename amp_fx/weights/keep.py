"""``amp_fx.keep``: caches a value computed from weights, and recomputes it after writes to them."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import OptionError
from amp_fx.policies.calls import bind, written_arguments
from amp_fx.random_states import host_random_state
from amp_fx.torch_private.autograd import temporarily_clear_interpreter_stack
from amp_fx.torch_private.modes import TorchDispatchMode, no_dispatch_modes
from amp_fx.torch_private.pytree import tree_leaves
from amp_fx.torch_private.tensors import data_address, is_cow_tensor
from amp_fx.weights.cache_entry import computing_values
from amp_fx.weights.call import CachedCall, verify_level
from amp_fx.weights.store import STORE
from amp_fx.weights.streams import accelerator_devices
from amp_fx.weights.swaps import before_swaps
from amp_fx.weights.watch import engine, is_available
from amp_fx.weights.write_signals import DEVICES, is_watchable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    Weights = tuple[torch.Tensor, ...]

Value = Any
"""A tensor, or a tuple of tensors."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _get(instance: Keep) -> Value:
    return instance._get()


def _as_input(getter: Callable[[Any], Value]) -> Any:
    """Returns a property that Dynamo treats as a plain attribute, so its tensors are graph inputs.

    Dynamo reads the property for guards and when it calls the graph. Relies on
    ``torch._dynamo.variables.user_defined``, which does not trace into a property whose getter is
    not a Python function.
    """
    as_method = ctypes.pythonapi.PyInstanceMethod_New
    as_method.restype, as_method.argtypes = ctypes.py_object, [ctypes.py_object]
    return property(as_method(getter))


class Keep:
    """Cached value computed from weights. ``amp_fx.keep`` returns it; a call returns the value."""

    def __init__(self, fn: Callable[..., Value], weights: Weights, *, verify: str) -> None:
        self._fn = fn
        self._verify = verify
        self._spec = _Computed(self, fn, len(weights))
        self._refs: list[Callable[[], torch.Tensor | None]] = []
        self._refer_to(weights)
        self._call: CachedCall | None = None
        if is_available():
            level = verify_level(verify)
            self._call = CachedCall([self._spec], (), owner=self._spec.name, verify=level)
        # Weak references to a weight are removed while ``torch.utils.swap_tensors`` swaps it.
        before_swaps(_hold_all)
        _KEEPS.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keep:
        """Returns an object that computes the value from the copied weights."""
        weights = tuple(copy.deepcopy(weight, memo) for weight in self._weights())
        return Keep(copy.deepcopy(self._fn, memo), weights, verify=self._verify)

    def __repr__(self) -> str:
        """Returns ``<amp_fx.keep(pack): fresh, 2 weights, 1,024 bytes>``."""
        if any(ref() is None for ref in self._refs):
            return f"<amp_fx.keep({self._spec.name}): a weight was freed>"
        state = "fresh" if self.is_fresh() else "stale" if self.bytes else "not computed"
        count = len(self._refs)
        weights = f"{count} weight" if count == 1 else f"{count} weights"
        return f"<amp_fx.keep({self._spec.name}): {state}, {weights}, {self.bytes:,} bytes>"

    def __copy__(self) -> Keep:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle the amp_fx.keep object of {self._spec.name}, because it refers to "
            "weights of this process: call amp_fx.keep again in the process that loads the weights"
        )

    def __call__(self) -> Value:
        """Returns the value, recomputed if a weight was written since its computation.

        A value that was returned earlier does not change while it is referenced. Do not write to
        the value.

        Returns:
            The result of ``fn``: a tensor or a tuple of tensors, without gradients.

        Raises:
            OptionError: A weight was freed, or the result of ``fn`` cannot be cached.
        """
        return self.value

    value = _as_input(_get)

    def _get(self) -> Value:
        if torch.compiler.is_exporting():
            raise OptionError(
                f"torch.export would turn the value of {self._spec.name} into a constant of the "
                "program, which would not follow updates of the weights: call the function itself "
                "in code that is exported"
            )
        weights = self._weights()
        call = self._call
        if call is None:
            with _outside_of_transforms(), computing_values():
                return self._spec.make(tuple(weight.detach() for weight in weights))
        call.devices = accelerator_devices(weights)  # the module may have been moved
        bound_and_values = call.enter(weights)
        if bound_and_values is None:
            with _outside_of_transforms():
                bound_and_values = call.prepare(weights)
        # The call may end before its caller reads the values: the store never reuses memory that
        # Python still refers to, and ``bound_and_values`` does.
        call.leave()
        values = tuple(bound_and_values[1])
        return values if self._spec.is_tuple else values[0]

    def is_fresh(self) -> bool:
        """Returns True if the next call returns the value without computing it.

        Returns False before the first call, after a write, and whenever ``why_remade`` is not
        empty.
        """
        weights = self._weights()
        return any(
            entry.spec is self._spec and entry.value is not None and entry.is_fresh()
            for entry in STORE.of_weight(weights[0])
        )

    def invalidate(self) -> None:
        """Makes the next call recompute the value."""
        with STORE.locked():
            for entry in STORE.of_weight(self._weights()[0]):
                if entry.spec is self._spec:
                    entry.slot.invalidate()

    @property
    def bytes(self) -> int:
        """Bytes that the value takes in addition to the weights; 0 before the first call."""
        entries = STORE.of_weight(self._weights()[0])
        return sum(entry.num_bytes for entry in entries if entry.spec is self._spec)

    @property
    def why_remade(self) -> str:
        """The reason why every call recomputes the value; empty if the value is cached."""
        return _why_remade(self._weights())

    def _weights(self) -> Weights:
        alive = tuple(ref() for ref in self._refs)
        if any(weight is None for weight in alive):
            raise OptionError(
                f"a weight of {self._spec.name} was freed, because amp_fx.keep refers to weights "
                "weakly: pass the parameter, not its .data or .detach(), and hold a reference to "
                "its module. If the parameter was replaced, for example by "
                "load_state_dict(assign=True), call amp_fx.keep again"
            )
        return alive  # type: ignore[return-value]

    def _hold(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Makes the references to the weights strong if ``tensor`` is one of the weights.

        Returns:
            A function that makes the references weak again; None if nothing changed.
        """
        weights = tuple(ref() for ref in self._refs)
        if all(weight is not tensor for weight in weights):
            return None
        self._refs = [functools.partial(_same, weight) for weight in weights]
        return functools.partial(self._refer_to, weights)

    def _refer_to(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Stores weak references to weights; None represents a weight that was freed."""
        self._refs = [functools.partial(_same, w) if w is None else weakref.ref(w) for w in weights]


def _same(weight: torch.Tensor | None) -> torch.Tensor | None:
    return weight


_KEEPS: weakref.WeakSet[Keep] = weakref.WeakSet()


def _hold_all(tensor: torch.Tensor) -> Callable[[], None]:
    callbacks = [instance._hold(tensor) for instance in list(_KEEPS)]

    def release() -> None:
        for callback in filter(None, callbacks):
            callback()

    return release


@contextlib.contextmanager
def _outside_of_transforms() -> Iterator[None]:
    """Disables ``torch.func`` transforms and dispatch modes, because cached values outlive them."""
    with temporarily_clear_interpreter_stack(), no_dispatch_modes():
        yield


def keep(fn: Callable[..., Value], *weights: torch.Tensor, verify: str = "sample") -> Keep:
    """Caches the result of a function of weights, and never returns a stale value.

    Use it for packed, concatenated, quantized or transposed weights in eager code, in an inference
    engine, or with a custom kernel::

        qkv = amp_fx.keep(lambda q, k, v: torch.cat([q, k, v]).bfloat16(), q, k, v)
        y = torch.nn.functional.linear(x, qkv())  # computed once per write to a weight

    All writes are detected: in-place ops (also on ``.data`` or in inference mode), optimizers,
    ``load_state_dict``, assignments to ``.data``, collectives, compiled code and NumPy arrays.
    ``amp_fx.weight_cache`` counts, limits and clears these values together with those of compiled
    graphs. A new value reuses the memory of the previous one unless that is still referenced.

    Weights are referenced weakly. Subclasses of ``torch.Tensor``, weights in shared or mapped
    memory, and weights that FSDP or DeepSpeed manage cannot be watched. Every call then recomputes
    the value, and ``why_remade`` gives the reason. In code that ``torch.compile`` traces, the value
    is an input of the graph and reflects the weights at the start of the graph.

    Args:
        fn: Function of the weights, which it receives as tensors without gradients. It returns a
            tensor or a tuple of tensors that depend on the weights alone. It runs without autograd
            and autocast.
        *weights: One or more tensors, on devices of any type.
        verify: ``"sample"`` compares one element of each weight on the CPU with its earlier value
            per call; ``"full"`` recomputes and compares the value; ``"off"`` does neither.

    Returns:
        A callable that returns the value. Its first call runs ``fn``.

    Raises:
        OptionError: ``fn`` is no function, no weight was passed, or a weight is not a strided
            tensor with data. Raised by the first call if ``fn`` returns anything but tensors, a
            tensor that requires a gradient, or a view of a weight; if it writes to a weight; if it
            reads a tensor that is not among the weights; or if it draws random numbers without a
            generator of its own.
        ValueError: ``verify`` is not one of the three values.
    """
    if verify not in ("sample", "full", "off"):
        raise ValueError(f"verify must be 'sample', 'full' or 'off', got {verify!r}")
    if not callable(fn):
        raise OptionError(f"amp_fx.keep expects a function of the weights, got {fn!r}")
    if not weights:
        raise OptionError("amp_fx.keep needs at least one weight: pass it after the function")
    for weight in weights:
        _check_weight(weight)
    return Keep(fn, weights, verify=verify)


def _check_weight(weight: Any) -> None:
    if not isinstance(weight, torch.Tensor):
        raise OptionError(f"weights must be tensors, got {type(weight).__name__}")
    if weight.layout is not torch.strided or weight.is_quantized:
        raise OptionError(
            f"a weight with layout {weight.layout} and dtype {weight.dtype} cannot be watched: "
            "pass the dense tensor that it was computed from"
        )
    if weight.is_meta:
        raise OptionError("a weight on the meta device has no data: materialize the module first")


def _why_remade(weights: Weights) -> str:
    for weight in weights:
        if not is_available():
            return "the extension that watches weights could not be built: run python -m amp_fx env"
        if weight.device.type not in DEVICES:
            return f"writes to weights on {weight.device.type} cannot be detected"
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            return f"a weight is a {type(weight).__name__}, a subclass of torch.Tensor"
        if engine().is_distrusted(weight):
            return "a weight was written where PyTorch cannot see it"
        if not is_watchable(weight):
            return "a library shards a weight and frees its memory"
        if is_cow_tensor(weight):
            return "a weight and its lazy clone share memory until one of them is written"
        if not engine().watch(weight.detach()):
            return "PyTorch did not allocate a weight's memory: it is shared, mapped or NumPy's"
    return ""


class _Computed:
    """``ValueSpec`` of a value that a function computes."""

    is_alias = False

    def __init__(self, instance: Keep, fn: Callable[..., Value], count: int) -> None:
        self._instance = weakref.ref(instance)  # the function may hold references to the weights
        self.name = getattr(fn, "__qualname__", type(fn).__name__)
        self.positions = tuple(range(count))
        self.names = tuple(f"weight {i}" for i in range(count))
        self.ops = (self.name,)
        self._is_checked = False
        self.is_tuple = False
        self._device = torch.get_default_device()

    def key(self, weights: Weights) -> Hashable:  # noqa: ARG002
        """Returns the object itself, so that each call of ``keep`` has a separate value."""
        return self

    def cast_layout(self, weight: torch.Tensor) -> None:
        """Returns None: the function computes the value."""

    def make(self, weights: Weights) -> Value:
        """Calls the function; the first call runs under a mode that checks it."""
        instance = self._instance()
        assert instance is not None, "the caller holds the Keep object"
        checking = None if self._is_checked else _Checking(self.name, weights)
        with self._device, checking or contextlib.nullcontext():
            value = instance._fn(*weights)
        value = tuple(value) if isinstance(value, list) else value
        self._check(value, weights)
        self.is_tuple = isinstance(value, tuple)
        if checking is not None:
            checking.check_computed(value)
        self._is_checked = True
        return value

    def _check(self, value: Any, weights: Weights) -> None:
        outputs = value if isinstance(value, tuple) else (value,)
        if not outputs or not all(isinstance(output, torch.Tensor) for output in outputs):
            kinds = ", ".join(type(output).__name__ for output in outputs) or "nothing"
            raise OptionError(
                f"{self.name} must return a tensor or a tuple of tensors, got {kinds}"
            )
        weight_memory = {_identity(weight) for weight in weights}
        for output in outputs:
            if output.requires_grad:
                raise OptionError(
                    f"{self.name} returns a tensor that requires a gradient: detach it first"
                )
            if _identity(output) in weight_memory and output.numel():
                raise OptionError(
                    f"{self.name} returns a view of a weight, which needs no cache: clone it, "
                    "or use the weight itself"
                )


_DRAWS = (
    "draws random numbers, so its value would change with each write to a weight: draw them before "
    "and pass them to amp_fx.keep as a weight, or draw them with a generator that the function "
    "creates and seeds"
)


class _Checking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for writes to the weights, other existing tensors that are read, and random ops."""

    def __init__(self, name: str, weights: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._weights = {_identity(weight) for weight in weights}
        self._allowed = {0, *self._weights}
        self._random_state = host_random_state()
        self._results: list[torch.Tensor] = []  # referenced so that identities are not reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_literal = func is torch.ops.aten.lift_fresh.default  # torch.tensor(...) in the function
        for value in tree_leaves((args, kwargs)):
            if not isinstance(value, torch.Tensor):
                continue
            if _identity(value) not in self._allowed and not is_literal:
                raise OptionError(
                    f"{self._name} reads a tensor of shape {tuple(value.shape)} that is not among "
                    "the weights: pass it to amp_fx.keep as a weight, so that its writes are "
                    "detected"
                )
        arguments = bind(func, args, kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and arguments.get("generator") is None:
            raise OptionError(f"{self._name} {_DRAWS}")
        for value in tree_leaves([arguments.get(name) for name in written_arguments(func)]):
            if isinstance(value, torch.Tensor) and _identity(value) in self._weights:
                raise OptionError(f"{self._name} writes to a weight: clone it first")
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._allowed.add(_identity(value))
                self._results.append(value)
        return result

    def check_computed(self, value: Value) -> None:
        """Raises if the function returned a tensor that it did not compute, such as a global.

        Also raises if it drew numbers from Python's or NumPy's global generator.
        """
        if host_random_state() != self._random_state:
            raise OptionError(f"{self._name} {_DRAWS}")
        for output in value if isinstance(value, tuple) else (value,):
            if _identity(output) not in self._allowed:
                raise OptionError(
                    f"{self._name} returns a tensor of shape {tuple(output.shape)} that it did not "
                    "compute from the weights: pass it to amp_fx.keep as a weight, or omit it"
                )


def _identity(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory or 0; for wrapper subclasses, the object's id."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return data_address(tensor) or (0 if is_plain else id(tensor))
