"""Traces: the ops that a program ran, with locations and samples of their results.

A digest of all bytes of each result shows whether results are equal. The file is a dictionary of
lists, strings, numbers and one tensor of bytes: ``torch.load(path, weights_only=True)`` reads it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError
from amp_fx.numerics.trace_diff import TraceDiff, TracedOp, aligned, op_differences
from amp_fx.observe.ops import is_tracked
from amp_fx.observe.recorder import Event, Sink
from amp_fx.observe.storages import Marks

if TYPE_CHECKING:
    import os
    from typing import Self

    from amp_fx.graphs.locations import NodeLocation
    from amp_fx.torch_private.ops import OpOverload

SCHEMA = 1
"""The version of the file format."""
SAMPLE = 256
"""The largest number of elements of a result in a file."""


_PLAIN = tuple(field.name for field in dataclasses.fields(TracedOp) if field.name != "values")


class Trace:
    """The ops that a program ran, in order.

    Attributes:
        name: The name of the program, and the version of torch.
        ops: The ops.
    """

    def __init__(self, name: str) -> None:
        self.name, self.ops = name, list[TracedOp]()

    def add(
        self,
        stage: str,
        place: NodeLocation,
        op: str,
        result: torch.Tensor,
        inputs: tuple[int, ...] = (),
    ) -> None:
        """Adds a result of an op.

        Args:
            stage: ``"forward"``, ``"backward"`` or ``"result"``.
            place: The module and line of the op.
            op: The name of the op.
            result: The result, which the program may overwrite later.
            inputs: The numbers of the ops that made its inputs.
        """
        values = result.detach().reshape(-1)
        digest = _digest(values)
        values = values[:: max(1, -(-values.numel() // SAMPLE))].cpu().clone()
        dtype, shape = dtype_name(result.dtype), tuple(result.shape)
        where = stage, place.module, op, place.source
        self.ops.append(TracedOp(*where, dtype, shape, inputs, digest, values))

    def diff(self, other: Trace) -> TraceDiff:
        """Compares with a trace of another run of the same program."""
        pairs = aligned(self.ops, other.ops)
        return TraceDiff(
            before=self.name,
            after=other.name,
            num_aligned=len(pairs),
            only_before=len(self.ops) - len(pairs),
            only_after=len(other.ops) - len(pairs),
            ops=tuple(op_differences(self.ops, other.ops, pairs)),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file."""
        values = [op.values.contiguous().view(torch.uint8) for op in self.ops]
        torch.save(
            {
                "amp_fx trace": SCHEMA,
                "name": self.name,
                "ops": [[getattr(op, name) for name in _PLAIN] for op in self.ops],
                "bytes": torch.cat([*values, torch.empty(0, dtype=torch.uint8)]),
            },
            path,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file.

        Raises:
            OptionError: The file does not exist or is not a trace.
        """
        try:
            found = torch.load(path, weights_only=True)
            is_trace = found["amp_fx trace"] == SCHEMA
        except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.PickleError) as error:
            raise OptionError(f"{path} is not a trace of amp_fx.record: {error}") from error
        if not is_trace:
            raise OptionError(f"{path} is a trace of another version of amp_fx")
        trace, start = cls(found["name"]), 0
        for fields in found["ops"]:
            named = dict(zip(_PLAIN, fields, strict=True))
            dtype = getattr(torch, named["dtype"])
            count = sampled(torch.Size(named["shape"]).numel())
            stop = start + count * dtype.itemsize
            values = found["bytes"][start:stop].clone().view(dtype)
            trace.ops.append(TracedOp(**named, values=values))
            start = stop
        return trace

    def __repr__(self) -> str:
        """Returns one line."""
        return f"<Trace of {self.name}: {len(self.ops)} results>"


def sampled(size: int) -> int:
    """Returns the number of elements of a result in a file."""
    step = max(1, -(-size // SAMPLE))
    return -(-size // step)


def _digest(values: torch.Tensor) -> str:
    """Returns a hash of the bytes of a tensor."""
    plain = values.cpu().contiguous()
    data = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def op_label(op: OpOverload) -> str:
    """Returns the name of an op, and of its variants in place or without writes: ``"add"``."""
    return re.sub(r"^_?(native_)?|(_legit|_no_training|_functional)|_$", "", op._opname)


class TraceSink(Sink):
    """Adds the results of a program to a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._makers: Marks[int] = Marks()

    def after(self, event: Event, before: Any) -> None:
        """Adds the results of an op."""
        del before
        if event.stage == "again" or event.facts.is_view or event.facts.is_empty:
            return
        makers = [self._makers.get(t) for t in event.tensors if t.layout is torch.strided]
        inputs = tuple(dict.fromkeys(number for number in makers if number is not None))
        results = event.results[:1] if event.facts.saves else event.results
        # Ops on lists, such as fused optimizers, return nothing.
        for result in filter(is_traced, results or event.written):
            self._makers.put(result, len(self.trace.ops))
            self.trace.add(event.stage, event.location, op_label(event.op), result, inputs)


def is_traced(value: Any) -> bool:
    """Returns True if a result goes into traces: a dense floating-point tensor with data."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and is_tracked(value) and value.numel() > 0
