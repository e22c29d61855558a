"""Finds where a policy and the installed torch's autocast disagree, op by op.

What autocast does is measured: the op is called under autocast with fake tensors of several dtypes
while a Python kernel sits on its Autograd dispatch key, the next one after Autocast. That kernel
notes which overload was reached and in which dtypes, and goes no further, so the arguments need
make no sense and the device need not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_fx.errors import PolicyError
from amp_fx.regions.kernels import added_kernels, autocast_key
from amp_fx.regions.state import AutocastState
from amp_fx.tables import OWN_KERNELS
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch._ops import OpOverload, OpOverloadPacket

    from amp_fx.policies.policy import Policy


MEASURED = ("cpu", "cuda", "xpu", "mps")
"""Device types whose policies can be measured."""

COMPARED = (*MEASURED, "mtia", "maia")
"""Device types whose autocast PyTorch registers itself."""

_LOW, _FP32, _FP64 = torch.bfloat16, torch.float32, torch.float64

# The kernel that a ban registers is recognised by what it raises.
_BAN = "unsafe to autocast"

# A value for each argument that must be given, by the type in the schema.
_FILLERS: dict[str, Any] = {
    "int": 1,
    "SymInt": 1,
    "float": 1.0,
    "bool": False,
    "number": 1,
    "str": "dimname::any",  # before torch 2.13 a string may be the name of a dimension
    "List[int]": [1],
    "List[SymInt]": [1],
    "List[float]": [1.0],
    "List[bool]": [False],
    "List[str]": ["dimname::any"],
}

# Kernels and the autocast state belong to the process and the thread: one measurement at a time.
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Arrival:
    """One call as it came through autocast."""

    op: str
    dtypes: tuple[torch.dtype, ...]
    dtype_argument: torch.dtype | None


class _Arrived(Exception):  # noqa: N818 - a signal, not an error
    """Ends a call once its arrival is noted."""


def measure(op: str, device_type: str) -> CastPolicy | None:
    """The cast policy that the installed torch's autocast gives an op.

    Puts kernels on the op for the time of the call: do not run the op in another thread
    meanwhile.

    Returns:
        The policy; None if autocast leaves the op alone.
    """
    if device_type not in MEASURED:
        raise PolicyError(
            f"policies cannot be measured on {device_type!r}, only on {', '.join(MEASURED)}"
        )
    if not _exists(op):
        raise PolicyError(f"torch {torch.__version__} has no op {op!r}")
    if _num_tensors(_schema(op)) == 0:
        raise PolicyError(f"{op} takes no tensor, so autocast never sees it")
    call = functools.partial(_arrival, op, device_type)
    state = AutocastState.ambient().turned(device_type, enabled=True, dtype=_LOW)
    with _lock, _capturing(op, f"Autograd{device_type.upper()}"), state.applied():
        arrivals = {given: call(given) for given in _probes(_num_tensors(_schema(op)))}
    for policy in _POLICIES:
        if all(_describes(policy, op, given, arrival) for given, arrival in arrivals.items()):
            return policy
    raise PolicyError(f"autocast treats {op} on {device_type} as no cast policy describes")


_Given: TypeAlias = tuple[torch.dtype, ...]


def _probes(num_tensors: int) -> tuple[_Given, ...]:
    """Dtypes of the tensor arguments of each call, in order."""
    mixed = (_LOW, *[_FP32] * (num_tensors - 1))
    return (*((dtype,) * num_tensors for dtype in (_FP32, _LOW, _FP64)), mixed)


def _cast(given: _Given, dtype: torch.dtype) -> _Given:
    return tuple(d if d is _FP64 else dtype for d in given)


# In this order: an op of one tensor cannot be promoted, it looks untouched.
_POLICIES = (
    CastPolicy.BANNED,
    None,
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.FP32,
    CastPolicy.PROMOTE,
    CastPolicy.FP32_SET_OPT_DTYPE,
    CastPolicy.FP32_APPEND_DTYPE,
)


def _describes(policy: CastPolicy | None, op: str, given: _Given, arrival: _Arrival | None) -> bool:
    """Whether a policy makes of a call what arrived; None arrives of a banned one."""
    if arrival is None:
        return policy is CastPolicy.BANNED
    is_double = given[0] is _FP64
    widest = _LOW if set(given) == {_LOW} else _FP32
    expected = {
        None: (given, None),
        CastPolicy.LOWER_PRECISION_FP: (_cast(given, _LOW), None),
        CastPolicy.FP32: (_cast(given, _FP32), None),
        CastPolicy.PROMOTE: (_cast(given, widest), None),
        CastPolicy.FP32_SET_OPT_DTYPE: (given, None if is_double else _FP32),
        CastPolicy.FP32_APPEND_DTYPE: (given, _FP64 if is_double else _FP32),
    }
    is_other_overload = policy is CastPolicy.FP32_APPEND_DTYPE
    arrived = (arrival.dtypes, arrival.dtype_argument)
    return (arrival.op != op) is is_other_overload and arrived == expected.get(policy)


def _arrival(op: str, device_type: str, given: _Given) -> _Arrival | None:
    """Calls the op with tensors of the given dtypes; None if it is banned."""
    args, kwargs = _arguments(_schema(op), given, device_type)
    try:
        _overload(op)(*args, **kwargs)
    except _Arrived as arrived:
        arrival: _Arrival = arrived.args[0]
        return arrival
    except RuntimeError as error:
        if _BAN in str(error):
            return None
        raise
    raise PolicyError(f"{op} on {device_type} never reached the Autograd key")


@contextlib.contextmanager
def _capturing(op: str, key: str) -> Iterator[None]:
    """Kernels on all overloads of the op's packet: a policy may call a sibling.

    Relies on a kernel for a device's own Autograd key coming before the one registered for
    all devices, and on an exception leaving a Python kernel as it is.
    """
    with torch.library._scoped_library(op.partition("::")[0], "IMPL") as library:
        for name in _siblings(op):
            library.impl(name, _signal(name), key)
        yield


def _signal(op: str) -> Callable[..., None]:
    schema = _schema(op)

    def kernel(*args: Any, **kwargs: Any) -> None:
        bound = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        castable = [bound[a.name] for a in schema.arguments if _tensors_of(a) and a.name in bound]
        flat = [t for value in castable for t in (value if isinstance(value, list) else [value])]
        raise _Arrived(_Arrival(op, tuple(t.dtype for t in flat), bound.get("dtype")))

    return kernel


def _arguments(
    schema: torch.FunctionSchema, given: _Given, device_type: str
) -> tuple[list[Any], dict[str, Any]]:
    mode = FakeTensorMode()
    dtypes = iter(given)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        tensors = [_fake(mode, device_type, next(dtypes)) for _ in range(_tensors_of(argument))]
        value = _value(argument, tensors)
        if argument.kwarg_only and not tensors and argument.has_default_value():
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(argument: torch.Argument, tensors: list[torch.Tensor]) -> Any:
    kind = str(argument.type)
    if kind == "List[Tensor]":
        return tensors
    if tensors:
        return tensors[0]
    if kind == "List[Optional[Tensor]]":
        return [None]
    if argument.has_default_value():
        return argument.default_value
    return None if kind.startswith("Optional[") else _FILLERS[kind]


def _tensors_of(argument: torch.Argument) -> int:
    """How many tensors to give for an argument that autocast may cast."""
    return {"Tensor": 1, "Optional[Tensor]": 1, "List[Tensor]": 2}.get(str(argument.type), 0)


def _num_tensors(schema: torch.FunctionSchema) -> int:
    return sum(_tensors_of(argument) for argument in schema.arguments)


def _fake(mode: FakeTensorMode, device_type: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a device that need not exist; relies on FakeTensor's constructor."""
    return FakeTensor(
        mode, torch.empty(2, 2, dtype=dtype, device="meta"), torch.device(device_type)
    )


def _overload(op: str) -> OpOverload:
    overload: OpOverload = getattr(_packet(op), op.partition(".")[2] or "default")
    return overload


def _packet(op: str) -> OpOverloadPacket:
    namespace, _, name = op.partition(".")[0].partition("::")
    packet: OpOverloadPacket = getattr(getattr(torch.ops, namespace), name)
    return packet


def _siblings(op: str) -> list[str]:
    """The overloads of the op's packet that take tensors; the others are TorchScript's own."""
    name = op.partition(".")[0]
    overloads = _packet(op).overloads()  # type: ignore[no-untyped-call]
    names = [name if overload == "default" else f"{name}.{overload}" for overload in overloads]
    return [sibling for sibling in names if _num_tensors(_schema(sibling)) > 0]


def _exists(op: str) -> bool:
    """Relies on ``torch.ops`` having no attribute for an op that is not registered."""
    try:
        _overload(op)
    except AttributeError:
        return False
    return True


def _schema(op: str) -> torch.FunctionSchema:
    name, _, overload = op.partition(".")
    return torch._C._get_schema(name, overload)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One op that a policy and the installed torch treat differently.

    Attributes:
        device_type: On which device type.
        op: Qualified overload name.
        ours: The policy's rule; None if it has none.
        torch: The installed torch's; None if it has none.
        note: More, where the two rules do not say it all.
    """

    device_type: str
    op: str
    ours: CastPolicy | None
    torch: CastPolicy | None
    note: str = ""

    def __str__(self) -> str:
        """One line that names the op and says what differs."""
        here = f"{self.device_type}: {self.op}"
        if self.note:
            return f"{here}: {self.note}"
        if self.ours is None or self.torch is None:
            rule = self.ours or self.torch
            where = "missing here" if self.ours is None else "missing in torch"
            return f"{here}: {where} ({rule.value if rule else 'no policy'})"
        return f"{here}: other policy ({self.ours.value} here, {self.torch.value} in torch)"


def find_drift(policy: Policy, device_types: Iterable[str] | None = None) -> tuple[Difference, ...]:
    """Compares a policy with what the installed torch registers and does.

    Names are compared on every device type, policies on those where they can be measured
    (``amp_fx.regions.drift``; no device is needed). Ops outside of the ``aten`` namespace, those
    that ``OWN_KERNELS`` lists, and device types whose autocast PyTorch does not register
    itself are left out. Run no model in another thread meanwhile.

    Returns:
        The differences by device type, then by name; empty if there are none.
    """
    chosen = policy.tables if device_types is None else device_types
    return tuple(
        difference
        for device_type in chosen
        if device_type in COMPARED
        for difference in _drift_on(policy, device_type)
    )


def registered_ops(device_type: str) -> frozenset[str]:
    """The ops for which the installed torch registers an autocast kernel, not amp_fx.

    Relies on the registrations of a dispatch key being listed by qualified overload name, for
    devices that the build does not support as well.
    """
    key = autocast_key(device_type)
    ours = {op for device, op in added_kernels if device == device_type}
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key)) - ours


def _drift_on(policy: Policy, device_type: str) -> list[Difference]:
    table = policy.tables.get(device_type, {})
    own_kernels = OWN_KERNELS.get(device_type, ())
    theirs = {op for op in registered_ops(device_type) if op.startswith("aten::")}
    theirs.difference_update(own_kernels)
    differences = (
        _difference(op, device_type, table.get(op), is_registered=op in theirs)
        for op in sorted(theirs | set(table))
    )
    return [difference for difference in differences if difference is not None]


def _difference(
    op: str, device_type: str, ours: CastPolicy | None, *, is_registered: bool
) -> Difference | None:
    if not is_registered:
        return Difference(device_type, op, ours, None)
    if device_type not in MEASURED:
        note = "missing here (what torch does cannot be measured on this device type)"
        return Difference(device_type, op, None, None, note) if ours is None else None
    try:
        theirs = measure(op, device_type)
    except PolicyError as error:
        return Difference(device_type, op, ours, None, note=str(error))
    return None if ours is theirs else Difference(device_type, op, ours, theirs)
