"""``python -m tests.traffic float8``: what training in float8 moves, beside compiled torchao.

Counted as ``bytes`` counts, with all kernels that quantize weights. Predicted times are those of
``roofline``, with products of float8 at twice the rate of bfloat16. Nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.tables.float8 import RECIPES
from tests.float8.torchao_oracle import linear_names
from tests.traffic.command import _answers
from tests.traffic.models import CASES, TINY
from tests.traffic.pretend import CAPABILITY, can_pretend
from tests.traffic.roofline import GPUS, operations, update_seconds
from tests.traffic.totals import Totals, totals
from tests.traffic.worker import NATIVE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.traffic.models import Case

SHOWN = ("gpt2", "llama", "vit", "dit")
BATCHES = (1, 4)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train a model.

    Attributes:
        first: What the first call after an update moves, with what is made of weights then.
        further: What each other call moves.
        failures: Kernels that do not compile to machine code.
    """

    first: Totals
    further: Totals
    failures: Mapping[str, str]

    def of_update(self, count: int) -> tuple[int, int]:
        """Bytes and launches of all micro-batches of an update, without its step."""
        calls = [self.first, *[self.further] * (count - 1)]
        return sum(c.num_bytes for c in calls), sum(c.num_launches + c.num_extern for c in calls)


def contenders(recipe: str) -> tuple[str, str]:
    """The names of torchao and amp_fx with a recipe."""
    return f"torchao-{recipe}", f"float8-{recipe}"


def count(name: str, ways: Sequence[str], *, device: str, is_tiny: bool) -> dict[str, Way]:
    """Counts one model, in a process of its own.

    Raises:
        RuntimeError: A way has no figures.
    """
    capabilities = [10 * CAPABILITY[0] + CAPABILITY[1]] if device == "cuda" else []
    job = {"case": name, "device": device, "dtype": "bfloat16", "trains": True, "tiny": is_tiny}
    jobs = [{**job, "contender": way, "capabilities": capabilities} for way in ways]
    found = {}
    for way, answer in zip(ways, _answers(jobs), strict=True):
        if "error" in answer:
            raise RuntimeError(f"{name}, {way}: {answer['error']}")
        first = totals(answer["first"], answer["refreshed"], device)
        failures = {k: v for some in answer["cubin_failures"].values() for k, v in some.items()}
        found[way] = Way(first, totals(answer["further"], [], device), failures)
    return found


def float8_operations(case: Case, recipe: str) -> int:
    """Operations of one call, with its backward, that run in float8.

    Args:
        case: The model.
        recipe: One of ``RECIPES``.
    """
    found = 0

    def note(module: nn.Module, args: Any) -> None:
        nonlocal found
        assert isinstance(module, nn.Linear)
        found += 2 * args[0].numel() * module.out_features

    with FakeTensorMode():
        model = case.build()
        for name in linear_names(model):
            model.get_submodule(name).register_forward_pre_hook(note)
        inputs: list[Any] = [torch.empty(case.shape)]
        if case.num_words:
            inputs.append(torch.empty(case.shape[:-1], dtype=torch.long))
        model(*inputs)
    return found * (3 if RECIPES[recipe].has_float8_weight_grads else 2)


def predicted(way: Way, num_batches: int, work: tuple[int, int], gpu: str) -> float:
    """Seconds of an update with a fused AdamW step."""
    first, further = map(dataclasses.asdict, (way.first, way.further))
    return update_seconds(first, further, num_batches, work, GPUS[gpu])


def main(argv: Sequence[str]) -> int:
    """Prints tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.traffic float8", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {' '.join(SHOWN)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it can be")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial, no figures")
    given = parser.parse_args(list(argv))
    device = given.device or ("cuda" if can_pretend() else "cpu")
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"case {unknown[0]}: not one of {', '.join(CASES)}")
    print_ = sys.stdout.write
    title = "torchao, 1 | amp_fx, 1 | torchao, 4 | amp_fx, 4"
    print_(f"| GB (kernels) per update | bfloat16, 1 | {title} |\n{'|---' * 6}|\n")
    times = [f"| step on {given.gpu} / bfloat16's | {title} |\n{'|---' * 5}|\n"]
    for name in given.cases or SHOWN:
        case = (TINY if given.tiny else CASES)[name]
        ways = [NATIVE, *(way for recipe in RECIPES for way in contenders(recipe))]
        found = count(name, ways, device=device, is_tiny=given.tiny)
        work = operations(case, trains=True)
        for recipe in RECIPES:
            both = [found[way] for way in contenders(recipe)]
            moved = [found[NATIVE].of_update(1), *(w.of_update(n) for n in BATCHES for w in both)]
            cells = " | ".join(f"{b / 1e9:.2f} ({k})" for b, k in moved)
            print_(f"| {case.about}, {recipe} | {cells} |\n")
            # A product at twice the rate counts half.
            saved = float8_operations(case, recipe) // 2
            shares = [
                predicted(way, n, (work[0] - saved, work[1]), given.gpu)
                / predicted(found[NATIVE], n, work, given.gpu)
                for n in BATCHES
                for way in both
            ]
            times.append(f"| {case.about}, {recipe} | {' | '.join(f'{s:.2f}' for s in shares)} |\n")
    print_("\n" + "".join(times))
    return 0
