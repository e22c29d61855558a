"""Names of ops: registered names, and the spellings that users may pass."""

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
    """Splits names at whitespace, and adds ``aten::`` to names without a namespace."""
    return tuple(name if "::" in name else f"aten::{name}" for name in names.split())


# Prefixes that users may write, longest first, with their replacements.
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

# Public functions whose ops have different names.
_RENAMED = {"aten::cross_entropy": "aten::cross_entropy_loss"}


def all_ops() -> frozenset[str]:
    """Returns the qualified names of all registered overloads, such as ``"aten::softmax.int"``."""
    return frozenset(all_op_names())


def is_functional(op: str) -> bool:
    """Returns True if a registered op writes none of its arguments, including ``out=``."""
    name, _, overload = op.partition(".")
    return not schema_of(name, overload).is_mutable


def overloads_by_packet() -> dict[str, list[str]]:
    """Returns sorted qualified overload names by packet."""
    packets: dict[str, list[str]] = {}
    for op in sorted(all_ops()):
        packets.setdefault(op.partition(".")[0], []).append(op)
    return packets


def find_overloads(text: str, also: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the op overloads that a user's spelling refers to.

    Args:
        text: ``softmax``, ``softmax.int``, ``aten::softmax``, ``torch.ops.aten.softmax.int``
            or a public function such as ``torch.nn.functional.softmax``.
        also: Overloads to consider in addition to the registered ones, such as those of a table for
            another torch version.

    Returns:
        Sorted qualified overload names: the named overload, or all functional overloads of the
        packet, or all its overloads if none is functional.

    Raises:
        PolicyError: The op does not exist. The message suggests similar names.
    """
    registered, extra = all_ops(), frozenset(also)
    candidates = registered | extra
    name = _qualified(text)
    packet, _, overload = name.partition(".")
    if overload == "default":
        name = packet
    if overload and name in candidates:
        return (name,)
    overloads = {op for op in candidates if op.partition(".")[0] == name}
    if not overloads:
        raise PolicyError(_unknown_op(text, name, candidates))
    functional = {op for op in overloads if op not in registered or is_functional(op)}
    return tuple(sorted(functional or overloads))


def op_text(op: object) -> str:
    """Returns the name of an op, which may be a name, an overload, a packet or a custom op.

    Relies on ``str`` of ``torch._ops.OpOverload`` and ``OpOverloadPacket`` (``aten.softmax.int``)
    and on ``_qualname`` of the result of ``torch.library.custom_op``.

    Raises:
        PolicyError: The argument is none of these.
    """
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return str(op).replace(".", "::", 1)
    text = op._qualname if isinstance(op, CustomOpDef) else op
    if not isinstance(text, str) or not text.strip():
        raise PolicyError(f"{op!r} is not an op or the name of one; write it like 'aten::softmax'")
    return text


def qualified_pattern(text: str) -> str:
    """Adds the namespace to a name or glob: ``aten::linalg_*`` for ``linalg_*``."""
    return _qualified(text)


def _qualified(text: str) -> str:
    name = text.strip()
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
            break
    name = name if "::" in name else f"aten::{name}"
    return _RENAMED.get(name, name)


def _unknown_op(text: str, name: str, candidates: Iterable[str]) -> str:
    packets = {op.partition(".")[0] for op in candidates}
    if "." in name and name.partition(".")[0] in packets:
        similar = sorted(op for op in candidates if op.startswith(name.partition(".")[0] + "."))
    else:
        similar = difflib.get_close_matches(name, packets, n=5, cutoff=0.6)
    message = f"torch {torch.__version__} has no op {text!r}"
    return f"{message}; similar names: {', '.join(similar)}" if similar else message
