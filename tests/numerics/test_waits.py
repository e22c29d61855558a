"""On an accelerator, ``amp_fx.accuracy`` reads the measures of all ops together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from amp_fx.numerics import running
from tests.numerics.faults import FAULTS, MODELS, TinyGPT

READS = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
)
"""Ops whose result the host has to wait for; so has ``tolist``, which is no op. Below autograd,
``item`` and ``is_nonzero`` are not split."""


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func._schema.name in READS
        return func(*args, **(kwargs or {}))


def reads_of(step: Any, *inputs: Any) -> tuple[int, int]:
    """Returns the number of reads while a step is examined, and that of its ops."""
    reads, to_list = Reads(), torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        reads.num_reads += 1
        return to_list(tensor)

    with pytest.MonkeyPatch.context() as patch, reads:
        patch.setattr(torch.Tensor, "tolist", tolist)
        report = amp_fx.accuracy(step)(*inputs)
    return reads.num_reads, len(report.nodes)


def test_the_host_waits_for_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read for each of 200 ops on the CPU; a few for the whole step elsewhere."""
    num_reads, num_ops = reads_of(TinyGPT(), *TinyGPT.inputs())
    assert num_reads > num_ops
    monkeypatch.setattr(running, "WAITING", ())
    num_reads, _ = reads_of(TinyGPT(), *TinyGPT.inputs())
    assert num_reads < num_ops / 10


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_reads_at_the_end_give_the_same_report(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overflows are found at the end, and healed in a run that reads each op."""
    fault = FAULTS.get(name or "")
    dtype = fault.dtype if fault is not None else "float16"

    def report() -> str:
        torch.manual_seed(0)
        net = MODELS["bare"](None if fault is None else fault.make())
        found: str = amp_fx.accuracy(net, dtype=dtype)(*MODELS["bare"].inputs()).to_json()
        return found

    expected = report()
    monkeypatch.setattr(running, "WAITING", ())
    assert report() == expected
