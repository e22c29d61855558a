"""Names of ops: those that the installed torch has, and those that a caller means."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import PolicyError
from amp_fx.torch_private.ops import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    all_op_names,
    schema_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def ops(names: str) -> tuple[str, ...]:
    """Splits names at blanks, and qualifies those without a namespace with ``aten::``."""
    return tuple(name if "::" in name else f"aten::{name}" for name in names.split())


# Spellings of a caller's module, longest first, and what they stand for in an op's name.
_PREFIXES = (
    ("torch.nn.functional.", "aten::"),
    ("torch.ops.aten.", "aten::"),
    ("torch.special.", "aten::special_"),
    ("torch.linalg.", "aten::linalg_"),
    ("torch.Tensor.", "aten::"),
    ("torch.fft.", "aten::fft_"),
    ("torch.", "aten::"),
    ("aten.", "aten::"),
    ("F.", "aten::"),
)

# Public functions whose op has another name.
_RENAMED = {"aten::cross_entropy": "aten::cross_entropy_loss"}


def all_ops() -> frozenset[str]:
    """Qualified names of all op overloads that are registered: ``"aten::softmax.int"``."""
    return frozenset(all_op_names())


def is_functional(op: str) -> bool:
    """Returns True if a registered op writes to none of its arguments, in place or by ``out=``."""
    name, _, overload = op.partition(".")
    return not schema_of(name, overload).is_mutable


def overloads_by_packet() -> dict[str, list[str]]:
    """Qualified overload names by what stands before their dot; sorted."""
    packets: dict[str, list[str]] = {}
    for op in sorted(all_ops()):
        packets.setdefault(op.partition(".")[0], []).append(op)
    return packets


def find_overloads(text: str, also: Iterable[str] = ()) -> tuple[str, ...]:
    """The op overloads that somebody means.

    Args:
        text: ``softmax``, ``softmax.int``, ``aten::softmax``, ``torch.ops.aten.softmax.int``
            or a public function such as ``torch.nn.functional.softmax``.
        also: Overloads known besides the registered ones (a table's, perhaps of another
            torch version).

    Returns:
        Qualified overload names, sorted: the one that was named, or all functional ones of
        the packet, or all there are if none is functional.

    Raises:
        PolicyError: There is no such op; names similar ones.
    """
    registered, extra = all_ops(), frozenset(also)
    known = registered | extra
    name = _qualified(text)
    packet, _, overload = name.partition(".")
    if overload == "default":
        name = packet
    if overload and name in known:
        return (name,)
    found = {op for op in known if op.partition(".")[0] == name}
    if not found:
        raise PolicyError(_unknown_op(text, name, known))
    functional = {op for op in found if op not in registered or is_functional(op)}
    return tuple(sorted(functional or found))


def op_text(op: object) -> str:
    """The name of an op that was given as a name, an overload, a packet or a custom op.

    Relies on ``str`` of ``torch._ops.OpOverload`` and ``OpOverloadPacket`` (``aten.softmax.int``)
    and on ``_qualname`` of what ``torch.library.custom_op`` returns.

    Raises:
        PolicyError: It is none of these.
    """
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return str(op).replace(".", "::", 1)
    text = op._qualname if isinstance(op, CustomOpDef) else op
    if not isinstance(text, str) or not text.strip():
        raise PolicyError(f"{op!r} is not an op or the name of one; write it like 'aten::softmax'")
    return text


def qualified_pattern(text: str) -> str:
    """A name or a glob for names with its namespace: ``aten::linalg_*`` for ``linalg_*``."""
    return _qualified(text)


def _qualified(text: str) -> str:
    name = text.strip()
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
            break
    name = name if "::" in name else f"aten::{name}"
    return _RENAMED.get(name, name)


def _unknown_op(text: str, name: str, known: Iterable[str]) -> str:
    packets = {op.partition(".")[0] for op in known}
    if "." in name and name.partition(".")[0] in packets:
        near = sorted(op for op in known if op.startswith(name.partition(".")[0] + "."))
    else:
        near = difflib.get_close_matches(name, packets, n=5, cutoff=0.6)
    message = f"torch {torch.__version__} has no op {text!r}"
    return f"{message}; similar names: {', '.join(near)}" if near else message
