"""The cases of the benchmark. A case yields its outcomes as they are measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_fx.bench.cases import compile_time, inference, models, overhead, scaler, serving
from amp_fx.bench.compare import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.bench.compare import Comparison, Figure, Watch
    from amp_fx.bench.contenders import Workload
    from amp_fx.bench.settings import Settings


@dataclasses.dataclass(frozen=True)
class Case:
    """A description, and a function that yields outcomes."""

    about: str
    run: Callable[[Settings, Watch], Iterator[Comparison | Figure]]


def _workloads(about: str, make: Callable[[Settings], Iterator[Workload]]) -> Case:
    """Returns a case that compares all contenders on each workload."""

    def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
        for workload in make(settings):
            comparison, figures = compare(workload, settings, watch)
            yield comparison
            yield from figures

    return Case(about, run)


CASES = {
    "mlp": _workloads("inference of stacked linear layers, batch 1 and 4", models.mlp),
    "mlp-train": _workloads(
        "fused AdamW steps of 1, 4 and 16 micro-batches, stacked linear layers", models.mlp_training
    ),
    "gpt-decode": _workloads("one token after a context, GPT-2 small", models.gpt_decode),
    "gpt-train": _workloads("fused AdamW steps of 1, 4 and 16 micro-batches", models.gpt_training),
    "vit": _workloads("a small vision Transformer, inference and training", models.vit),
    "conv": _workloads("shaped like ResNet-18, inference and training", models.conv),
    "lstm-cell": _workloads("a loop over nn.LSTMCell, inference and training", models.lstm_cell),
    "inference": Case("OpenVINO, zentorch and others, 1 and 2 threads", inference.run),
    "compile-time": Case("cold and warm compilation of a 12-layer Transformer", compile_time.run),
    "overhead": Case("overhead of a call and a refresh with 300 cached weights", overhead.run),
    "fairness": Case("native and a second native: the error of ratios", models.fairness),
    "serving": Case("latencies, and throughput of many clients, 1 and 2 threads", serving.run),
    "scaler": Case("overhead of loss scaling in an optimizer's step", scaler.run),
}
