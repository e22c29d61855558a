"""What can be timed. A case gives its outcomes one by one, as they are measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_fx.bench.cases import (
    compile_time,
    conv,
    fairness,
    gpt,
    lstm,
    mlp,
    overhead,
    scaler,
    vit,
)
from amp_fx.bench.compare import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.bench.compare import Comparison, Figure, Watch
    from amp_fx.bench.contenders import Workload
    from amp_fx.bench.settings import Settings


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        about: What it is, in a line.
        run: Measures, and gives what came out.
    """

    about: str
    run: Callable[[Settings, Watch], Iterator[Comparison | Figure]]


def _workloads(about: str, make: Callable[[Settings], Iterator[Workload]]) -> Case:
    """A case that compares all contenders on some workloads."""

    def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
        for workload in make(settings):
            comparison, figures = compare(workload, settings, watch)
            yield comparison
            yield from figures

    return Case(about, run)


CASES = {
    "mlp": _workloads("inference of stacked linear layers, batch 1 and 4", mlp.workloads),
    "mlp-train": _workloads(
        "fused AdamW steps of 1, 4 and 16 micro-batches, stacked linear layers",
        mlp.train_workloads,
    ),
    "gpt-decode": _workloads("one token after a context, GPT-2 small", gpt.decode_workloads),
    "gpt-train": _workloads("fused AdamW steps of 1, 4 and 16 micro-batches", gpt.train_workloads),
    "vit": _workloads("a small vision Transformer, inference and training", vit.workloads),
    "conv": _workloads("shaped like ResNet-18, inference and training", conv.workloads),
    "lstm-cell": _workloads("a loop over nn.LSTMCell, inference and training", lstm.workloads),
    "compile-time": Case("cold and warm compilation of a 12-layer Transformer", compile_time.run),
    "overhead": Case("what a call and a refresh cost where 300 weights are cached", overhead.run),
    "fairness": Case("native beside a second native: what the ratios are worth now", fairness.run),
    "scaler": Case("what loss scaling adds to an optimizer's step", scaler.run),
}
