"""Whether turns are fair: native beside a second native of its own, which has to take as long.

How far their ratio is from 1 is what no ratio of this machine says anything about at the moment.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_fx.bench.cases import models
from amp_fx.bench.compare import compare, paired_figure
from amp_fx.bench.contenders import BY_NAME, NATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.compare import Comparison, Figure, Watch
    from amp_fx.bench.settings import Settings

TWIN = dataclasses.replace(BY_NAME[NATIVE], name=f"{NATIVE}-twin")


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """A small training step: what it takes is mostly weights, which the two do not share."""
    if not settings.takes_part(NATIVE):
        return
    workload = next(models.mlp_training(settings))
    comparison, _ = compare(workload, settings, watch, (BY_NAME[NATIVE], TWIN))
    yield comparison
    figure = paired_figure(comparison, NATIVE, TWIN.name)
    if figure is not None:
        yield figure
