"""``amp_fx.register_op``: a cast policy for an op of a library's own, under every policy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import PolicyError
from amp_fx.policies.calls import castable_tensors, is_eligible, qualified_name, takes_policy
from amp_fx.policies.changes import arg_override, expand_ops, to_policy
from amp_fx.regions.kernels import prepare_op
from amp_fx.tables.op_names import op_text
from amp_fx.tables.registered import REGISTERED, RegisteredOp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amp_fx.policies.calls import Call
    from amp_fx.tables.cast_policy import CastPolicy

log = logging.getLogger(__name__)


def register_op(
    op: Any, policy: CastPolicy | str, args: Mapping[str, CastPolicy | str] | None = None
) -> None:
    """Gives an op a cast policy on all devices, in eager and in compiled code.

    It holds under ``torch.autocast`` and under every policy, as if all tables had it; what a
    policy says about the op itself, its module, or by rule comes before. Call it once, where
    the op is defined. If the op was reported before, all that was compiled is compiled anew.

    Args:
        op: Such as ``"mylib::op"``: all its overloads that compute, or ``"mylib::op.overload"``,
            or the op itself.
        policy: A cast policy, or its name.
        args: Arguments that are treated otherwise, as ``Policy.with_args`` takes them.

    Raises:
        PolicyError: There is no such op, policy or argument; the op cannot take the policy, is
            PyTorch's own (``Policy.with_ops`` is for these), or is registered otherwise.
    """
    op = op_text(op)
    found = to_policy(f"op {op!r}", policy)
    names = tuple(n for n in expand_ops(op) if takes_policy(n, found))
    if not names:
        raise PolicyError(f"op {op!r} cannot be {found.value}: it computes no tensors from tensors")
    entry = RegisteredOp(found, arg_override(op, args, ()).args if args else ())
    for name in names:
        _check(name, entry)
    REGISTERED.update(dict.fromkeys(names, entry))
    for name in names:
        prepare_op(name)
    if not _reported.isdisjoint(names):
        torch._dynamo.reset()
        _reported.difference_update(names)


def _check(name: str, entry: RegisteredOp) -> None:
    if name.startswith("aten::"):
        raise PolicyError(f"{name} is PyTorch's own: Policy.with_ops changes how it is cast")
    before = REGISTERED.setdefault(name, entry)
    if before != entry:
        raise PolicyError(
            f"{name} is registered as {before.policy.value} {dict(before.args)} already; "
            "Policy.with_ops gives it another policy"
        )


def report_mixture(call: Call, device_type: str) -> None:
    """Says once that an op which nobody has listed gets floating-point dtypes that differ."""
    name = qualified_name(call[0])
    if name.startswith(_OWN_NAMESPACES) or name in _reported:
        return
    tensors = [t for t in castable_tensors(call) if is_eligible(t, device_type)]
    dtypes = sorted({dtype_name(t.dtype) for t in tensors})
    if len(dtypes) < 2:
        return
    _reported.add(name)
    log.warning(
        "%s gets %s under autocast, which has no policy for it. If it rejects that, set "
        'the cast policy: amp_fx.register_op("%s", "fp32")  # or "lower_precision_fp", '
        '"promote", "keep"',
        name,
        " and ".join(dtypes),
        name,
    )


_OWN_NAMESPACES = ("aten::", "prims::", "prim::", "amp_fx::", "inductor::")
_reported: set[str] = set()
