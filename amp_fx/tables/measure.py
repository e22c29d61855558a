"""Measures the cast policies of the installed torch's autocast, and writes them to a file.

    python -m amp_fx.tables.measure [FOLDER]

An op is called under autocast with fake tensors of several dtypes, while a Python kernel is
registered on its Autograd dispatch key, the next key after Autocast. That kernel reports the
overload and the dtypes that arrive, and ends the call: the device need not exist, and the other
arguments need make no sense.

Run it in a process of its own. It replaces kernels while it runs, and takes kernels that amp_fx
registers for a policy for torch's.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from amp_fx.errors import PolicyError
from amp_fx.tables import DEVICES, OWN_KERNELS
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.presets import measured_file, torch_version
from amp_fx.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from amp_fx.torch_private.ops import registrations_for, schema_of, scoped_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.tables.cast_policy import Table
    from amp_fx.torch_private.ops import OpOverload, OpOverloadPacket

LIKE_XPU = ("mtia", "maia")
"""Device types whose Autograd key ``torch.library`` cannot register kernels on.

Their ops get the policy that XPU gives them: ATen registers all three from the same macros.
"""

_LOW, _FP32, _FP64 = torch.bfloat16, torch.float32, torch.float64

# A banned op is recognized by its error message.
_BAN = "unsafe to autocast"

# A value for each argument without a default, by its type in the schema.
_FILLERS: dict[str, Any] = {
    "int": 1,
    "SymInt": 1,
    "float": 1.0,
    "bool": False,
    "number": 1,
    "str": "",
    "List[int]": [1],
    "List[SymInt]": [1],
    "List[float]": [1.0],
}


def main(arguments: Sequence[str]) -> None:
    """Writes the file of the installed torch to the package, or to the given folder."""
    path = measured_file(torch_version())
    path = Path(*arguments, path.name) if arguments else path
    groups = {device_type: _by_policy(measured_table(device_type)) for device_type in DEVICES}
    path.write_text(json.dumps(groups, indent=1) + "\n", encoding="utf-8")


def _by_policy(table: Table) -> dict[str, list[str]]:
    """Groups the ops of a table by policy, without their namespace."""
    return {
        policy.value: [op.removeprefix("aten::") for op, found in table.items() if found is policy]
        for policy in CastPolicy
        if policy in table.values()
    }


def registered_ops(device_type: str) -> list[str]:
    """Returns the ops that torch registers on a device's Autocast key, sorted.

    Ops of other libraries and those in ``OWN_KERNELS`` are left out.
    """
    key = f"Autocast{device_type.upper()}"
    registered = registrations_for(key)
    aten = {op for op in registered if op.startswith("aten::")}
    return sorted(aten.difference(OWN_KERNELS.get(device_type, ())))


def measured_table(device_type: str) -> Table:
    """Returns the policies of the registered ops, sorted by op.

    Raises:
        PolicyError: Autocast treats an op as no cast policy describes.
    """
    ops = registered_ops(device_type)
    if device_type not in LIKE_XPU:
        policies = ((op, measure(op, device_type)) for op in ops)
        return {op: policy for op, policy in policies if policy is not None}
    xpu = measured_table("xpu")
    if missing := [op for op in ops if op not in xpu]:
        raise PolicyError(
            f"the policies of {', '.join(missing)} on {device_type} cannot be measured: "
            "XPU does not have these ops"
        )
    return {op: xpu[op] for op in ops}


_Given: TypeAlias = tuple[torch.dtype, ...]
_Arrival: TypeAlias = tuple[str, _Given, torch.dtype | None]
"""The overload, the dtypes of its tensors, and its ``dtype`` argument."""


class _Arrived(Exception):  # noqa: N818 - a signal, not an error
    """Ends a call at its Autograd kernel; its argument is the ``_Arrival``."""


def measure(op: str, device_type: str) -> CastPolicy | None:
    """Returns the cast policy of an op, by its qualified overload name; None if it has none.

    Raises:
        PolicyError: Autocast treats the op as no cast policy describes.
    """
    num_tensors = sum(map(_num_tensors, _schema(op).arguments))
    mixed = (_LOW, *[_FP32] * (num_tensors - 1))
    probes = (*((dtype,) * num_tensors for dtype in (_FP32, _LOW, _FP64)), mixed)
    key = f"Autograd{device_type.upper()}"
    with _reporting(op, key), _autocast_on(device_type):
        arrivals = {given: _arrival(op, device_type, given) for given in probes}
    for policy in _POLICIES:
        if all(_describes(policy, op, given, arrival) for given, arrival in arrivals.items()):
            return policy
    raise PolicyError(f"autocast treats {op} on {device_type} as no cast policy describes")


# None comes before PROMOTE: an op of one tensor cannot be promoted, it looks unchanged.
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
    """Returns True if a policy turns a call into what arrived."""
    if arrival is None:
        return policy is CastPolicy.BANNED
    arrived_op, *arrived = arrival
    is_double = given[0] is _FP64
    widest = _LOW if set(given) == {_LOW} else _FP32
    expected = {
        None: [given, None],
        CastPolicy.LOWER_PRECISION_FP: [_cast(given, _LOW), None],
        CastPolicy.FP32: [_cast(given, _FP32), None],
        CastPolicy.PROMOTE: [_cast(given, widest), None],
        CastPolicy.FP32_SET_OPT_DTYPE: [given, None if is_double else _FP32],
        CastPolicy.FP32_APPEND_DTYPE: [given, _FP64 if is_double else _FP32],
    }
    calls_sibling = policy is CastPolicy.FP32_APPEND_DTYPE
    return (arrived_op != op) is calls_sibling and arrived == expected.get(policy)


def _cast(given: _Given, dtype: torch.dtype) -> _Given:
    return tuple(d if d is _FP64 else dtype for d in given)


def _arrival(op: str, device_type: str, given: _Given) -> _Arrival | None:
    """Calls the op with tensors of the given dtypes; returns None if it is banned."""
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
    raise PolicyError(f"{op} on {device_type} does not reach the Autograd key")


@contextlib.contextmanager
def _autocast_on(device_type: str) -> Iterator[None]:
    """Turns autocast to bfloat16 on; ``torch.autocast`` would refuse a device that is missing."""
    dtype = torch.get_autocast_dtype(device_type)
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_dtype(device_type, _LOW)
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_enabled(device_type, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_cache_enabled(is_cached)
        torch.set_autocast_dtype(device_type, dtype)


@contextlib.contextmanager
def _reporting(op: str, key: str) -> Iterator[None]:
    """Registers kernels on all overloads of the op's packet: a policy may call a sibling.

    Relies on a kernel for a device's own Autograd key coming before the one registered for
    all devices, and on an exception leaving a Python kernel unchanged.
    """
    packet = op.partition(".")[0]
    names = _packet(op).overloads()  # type: ignore[no-untyped-call]
    siblings = [packet if name == "default" else f"{packet}.{name}" for name in names]
    with scoped_library(op.partition("::")[0], "IMPL") as library:
        for name in siblings:
            # Overloads without tensors are TorchScript's own.
            if any(map(_num_tensors, _schema(name).arguments)):
                library.impl(name, _reporter(name), key)
        yield


def _reporter(op: str) -> Callable[..., None]:
    schema = _schema(op)

    def kernel(*args: Any, **kwargs: Any) -> None:
        bound = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        castable = [bound[a.name] for a in schema.arguments if _num_tensors(a) and a.name in bound]
        flat = [t for value in castable for t in (value if isinstance(value, list) else [value])]
        raise _Arrived((op, tuple(t.dtype for t in flat), bound.get("dtype")))

    return kernel


def _arguments(
    schema: torch.FunctionSchema, given: _Given, device_type: str
) -> tuple[list[Any], dict[str, Any]]:
    mode = FakeTensorMode()
    dtypes = iter(given)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        tensors = [_fake(mode, device_type, next(dtypes)) for _ in range(_num_tensors(argument))]
        if not argument.kwarg_only:
            args.append(_value(argument, tensors))
        elif tensors or not argument.has_default_value():
            kwargs[argument.name] = _value(argument, tensors)
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


def _num_tensors(argument: torch.Argument) -> int:
    """Returns the number of tensors to pass for an argument that autocast may cast."""
    return {"Tensor": 1, "Optional[Tensor]": 1, "List[Tensor]": 2}.get(str(argument.type), 0)


def _fake(mode: FakeTensorMode, device_type: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on a device that need not exist; relies on FakeTensor's constructor."""
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


def _schema(op: str) -> torch.FunctionSchema:
    name, _, overload = op.partition(".")
    return schema_of(name, overload)


if __name__ == "__main__":
    main(sys.argv[1:])
