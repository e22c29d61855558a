"""Measures the cast policies of the installed torch's autocast, and writes them to a file.

    python -m tests.tables.measure [FOLDER]

Calls each op under autocast with fake tensors of several dtypes. A Python kernel on the op's
Autograd dispatch key, which follows Autocast, records the overload and the dtypes of its arguments,
and raises an exception. The device need not exist, and other arguments need not be valid.

Run it in a separate process, because it replaces kernels, and because it cannot distinguish kernels
that amp_fx has registered from those of torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from amp_fx.errors import PolicyError
from amp_fx.regions.autocast_kernels import autocast_key
from amp_fx.tables import DEVICES, OWN_KERNELS
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.presets import measured_file, torch_version
from amp_fx.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from amp_fx.torch_private.ops import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.tables.cast_policy import Table
    from amp_fx.torch_private.ops import OpOverload, OpOverloadPacket

LIKE_XPU = ("mtia", "maia")
"""Device types for whose Autograd keys ``torch.library`` cannot register kernels.

Their ops have the policies of XPU, because ATen registers all three from the same macros.
"""

_LOW, _FP32, _FP64 = torch.bfloat16, torch.float32, torch.float64

# A banned op is recognized by its error message, of PyTorch or amp_fx.
_BANS = ("unsafe to autocast", "is banned by the policy")

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
    """Writes the file of the installed torch into the package, or into a folder."""
    path = measured_file(torch_version())
    path = Path(*arguments, path.name) if arguments else path
    groups = {device_type: _by_policy(measured_table(device_type)) for device_type in DEVICES}
    path.write_text(json.dumps(groups, indent=1) + "\n", encoding="utf-8")


def _by_policy(table: Table) -> dict[str, list[str]]:
    """Groups the ops of a table by policy, without their namespace."""
    return {
        policy.value: [op.removeprefix("aten::") for op, other in table.items() if other is policy]
        for policy in CastPolicy
        if policy in table.values()
    }


def registered_ops(device_type: str) -> list[str]:
    """Returns the ops that torch registers on a device's Autocast key, sorted.

    Excludes ops of other libraries and those in ``OWN_KERNELS``.
    """
    key = autocast_key(device_type)
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    aten = {op for op in registered if op.startswith("aten::")}
    return sorted(aten.difference(OWN_KERNELS.get(device_type, ())))


def measured_table(device_type: str) -> Table:
    """Returns the policies of the registered ops, sorted by op.

    Raises:
        PolicyError: No cast policy describes the effect of autocast on an op.
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


_Dtypes: TypeAlias = tuple[torch.dtype, ...]
_Arrival: TypeAlias = tuple[str, _Dtypes, torch.dtype | None]
"""The overload, the dtypes of its tensors, and its ``dtype`` argument at the Autograd kernel."""


class _Arrived(Exception):  # noqa: N818 - a signal, not an error
    """Raised by an Autograd kernel to end a call; its argument is the ``_Arrival``."""


def measure(op: str, device_type: str) -> CastPolicy | None:
    """Returns the cast policy of an op, by its qualified overload name; None if it has none.

    Raises:
        PolicyError: No cast policy describes the effect of autocast on the op.
    """
    num_tensors = sum(map(_num_tensors, _schema(op).arguments))
    mixed = (_LOW, *[_FP32] * (num_tensors - 1))
    probes = (*((dtype,) * num_tensors for dtype in (_FP32, _LOW, _FP64)), mixed)
    key = autocast_key(device_type).replace("Autocast", "Autograd")
    with _reporting(op, key), _autocast_on(device_type):
        arrivals = {dtypes: _arrival(op, device_type, dtypes) for dtypes in probes}
    for policy in _POLICIES:
        if all(_describes(policy, op, dtypes, arrival) for dtypes, arrival in arrivals.items()):
            return policy
    raise PolicyError(f"no cast policy describes the effect of autocast on {op} on {device_type}")


# None precedes PROMOTE, because promotion does not change ops of one tensor.
_POLICIES = (
    CastPolicy.BANNED,
    None,
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.FP32,
    CastPolicy.PROMOTE,
    CastPolicy.FP32_SET_OPT_DTYPE,
    CastPolicy.FP32_APPEND_DTYPE,
)


def _describes(
    policy: CastPolicy | None, op: str, dtypes: _Dtypes, arrival: _Arrival | None
) -> bool:
    """Returns True if a policy explains the arrival of a call with tensors of some dtypes."""
    if arrival is None:
        return policy is CastPolicy.BANNED
    arrived_op, *arrived = arrival
    is_double = dtypes[0] is _FP64
    widest = _LOW if set(dtypes) == {_LOW} else _FP32
    expected = {
        None: [dtypes, None],
        CastPolicy.LOWER_PRECISION_FP: [_cast(dtypes, _LOW), None],
        CastPolicy.FP32: [_cast(dtypes, _FP32), None],
        CastPolicy.PROMOTE: [_cast(dtypes, widest), None],
        CastPolicy.FP32_SET_OPT_DTYPE: [dtypes, None if is_double else _FP32],
        CastPolicy.FP32_APPEND_DTYPE: [dtypes, _FP64 if is_double else _FP32],
    }
    calls_sibling = policy is CastPolicy.FP32_APPEND_DTYPE
    return (arrived_op != op) is calls_sibling and arrived == expected.get(policy)


def _cast(dtypes: _Dtypes, target: torch.dtype) -> _Dtypes:
    return tuple(dtype if dtype is _FP64 else target for dtype in dtypes)


def _arrival(op: str, device_type: str, dtypes: _Dtypes) -> _Arrival | None:
    """Calls the op with tensors of some dtypes; returns None if the op is banned."""
    args, kwargs = _arguments(_schema(op), dtypes, device_type)
    try:
        _overload(op)(*args, **kwargs)
    except _Arrived as arrived:
        arrival: _Arrival = arrived.args[0]
        return arrival
    except RuntimeError as error:
        if any(ban in str(error) for ban in _BANS):
            return None
        raise
    raise PolicyError(f"{op} on {device_type} does not reach the Autograd key")


@contextlib.contextmanager
def _autocast_on(device_type: str) -> Iterator[None]:
    """Enables autocast to bfloat16, also for missing devices, unlike ``torch.autocast``."""
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
    """Registers kernels for all overloads of the op's packet, because a policy may call a sibling.

    Relies on the kernel of a device's Autograd key taking precedence over the one for all devices,
    and on exceptions propagating out of Python kernels.
    """
    packet = op.partition(".")[0]
    names = _packet(op).overloads()  # type: ignore[no-untyped-call]
    siblings = [packet if name == "default" else f"{packet}.{name}" for name in names]
    with torch.library._scoped_library(op.partition("::")[0], "IMPL") as library:
        for name in siblings:
            # Overloads without tensors are specific to TorchScript.
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
    schema: torch.FunctionSchema, dtypes: _Dtypes, device_type: str
) -> tuple[list[Any], dict[str, Any]]:
    mode = FakeTensorMode()
    remaining = iter(dtypes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        tensors = [_fake(mode, device_type, next(remaining)) for _ in range(_num_tensors(argument))]
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
    """Returns a fake tensor on a device that need not exist."""
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
