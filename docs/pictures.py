"""Makes the pictures of the documentation: ``python docs/pictures.py``; needs Graphviz.

The plots show the medians in ``docs/assets/benchmarks.json``, a file of ``python -m benchmarks
--json FILE``. Contenders differ by their markers, not by colors alone.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from torch import nn

import amp_fx

ASSETS = Path(__file__).resolve().parent / "assets"
BENCHMARKS = ASSETS / "benchmarks.json"

# By name in the file: the label, the marker and its face color.
CONTENDERS = {
    "native": ("native", "X", "white"),
    "native-freezing": ("frozen", "s", "white"),
    "native-autotune": ("frozen, max_autotune", "D", "white"),
    "zentorch": ("zentorch", "^", "lightgray"),
    "openvino": ("OpenVINO", "v", "lightgray"),
    "amp_fx": ("amp_fx", "o", "black"),
    "roof": ("roof: reading the weights", "|", "black"),
}
STYLE = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib; its outlines are in the file
    "font.size": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "amp_fx",  # equal files for equal data
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Attention(nn.Module):
    """A small attention, as in the guide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of shape [length, width], in and out."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        result: torch.Tensor = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return result


def medians(path: Path = BENCHMARKS) -> dict[str, dict[str, float]]:
    """Returns seconds by workload and contender."""
    return {
        row["workload"]: {name: statistics.median(each) for name, each in row["seconds"].items()}
        for row in json.loads(path.read_text(encoding="utf-8"))["comparisons"]
    }


def errors(path: Path = BENCHMARKS) -> dict[str, dict[str, float]]:
    """Returns errors relative to float32 by workload and contender."""
    rows = json.loads(path.read_text(encoding="utf-8"))["comparisons"]
    return {row["workload"]: row["errors"] for row in rows}


def draw_times(path: Path) -> None:
    """Draws one line per workload: times of all contenders, relative to frozen native code."""
    times = medians()
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    for name, style in CONTENDERS.items():
        points = [
            (seconds[name] / seconds["native-freezing"], row)
            for row, seconds in enumerate(times.values())
            if name in seconds
        ]
        _plot(axes, points, *style, above=name == "amp_fx")
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.grid(axis="y", color="lightgray", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("time / that of frozen native code (left is faster)")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)


def draw_errors(path: Path) -> None:
    """Draws the error against the time of each contender, one panel per workload."""
    times = medians()
    rows = {name: error for name, error in errors().items() if error["native"]}
    figure, panels = plt.subplots(3, 3, figsize=(7.2, 6.4), layout="constrained")
    for panel, (workload, error) in zip(panels.flat, rows.items(), strict=True):
        for name, style in CONTENDERS.items():
            if name in error:
                point = (1e3 * times[workload][name], 1e3 * error[name])
                _plot(panel, [point], *style, above=name == "amp_fx")
        panel.set_title(workload.replace(", ", ",\n", 1), fontsize=8)
        panel.set_xlim(0, 1.08 * max(times[workload][name] for name in error) * 1e3)
        panel.set_ylim(0, 1.15e3 * max(error.values()))
    panels[1, 0].set_ylabel("error relative to float32, 1e-3")
    panels[-1, 1].set_xlabel("ms per call")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    _save(figure, path)


def _plot(axes: Any, points: Any, label: str, marker: str, face: str, *, above: bool) -> None:
    x, y = zip(*points, strict=True)
    settings = {"markerfacecolor": face, "markeredgecolor": "black", "markersize": 7}
    size = {"markersize": 14, "markeredgewidth": 2} if marker == "|" else {}
    order = 4 if above else 3
    axes.plot(x, y, linestyle="", marker=marker, label=label, zorder=order, **{**settings, **size})


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Writes all of them into ``docs/assets``."""
    with plt.rc_context(STYLE):
        draw_times(ASSETS / "times.svg")
        draw_errors(ASSETS / "errors.svg")
    with torch.no_grad():
        attention = amp_fx.explain(Attention(16))(torch.randn(8, 16))
    amp_fx.draw(attention, ASSETS / "attention.svg", depth=9)


if __name__ == "__main__":
    main()
