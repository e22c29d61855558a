"""Counts models in a separate process, because ``pretend`` changes torch for good."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.devices import wide_products
from amp_fx.dtypes import as_dtype
from amp_fx.replaced import replaced
from amp_fx.tables.float8 import FLOAT8_PRESETS, RECIPES
from tests.float8.torchao_oracle import converted
from tests.traffic.cached import FakeCache
from tests.traffic.counting import Counter
from tests.traffic.models import CASES, TINY
from tests.traffic.pretend import pretend_cuda
from tests.traffic.totals import totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.traffic.counting import Graph
    from tests.traffic.models import Case

NATIVE, AMP_FX, FROZEN, LEAN, LIMIT = "native", "amp_fx", "frozen", "lean", "limit"
CONTENDERS = (NATIVE, AMP_FX, LEAN, LIMIT)
POLICIES = {AMP_FX: "torch", FROZEN: "torch", LEAN: "lean"}
POLICIES |= {preset: preset for preset in FLOAT8_PRESETS}
TORCHAO = {f"torchao-{recipe}": recipe for recipe in RECIPES}
MARK = "counted: "
"""In front of each line of JSON; libraries print lines too."""

log = logging.getLogger(__name__)


def count(
    case: Case, contender: str, *, device: str, dtype: torch.dtype, trains: bool
) -> dict[str, Any]:
    """Counts one model, compiled by one contender.

    It is called twice, as by two micro-batches of one update.

    Args:
        case: The model and its input.
        contender: ``"native"``: inductor under ``torch.autocast``; ``"amp_fx"``; ``"lean"``:
            amp_fx with that preset; ``"frozen"``: amp_fx with frozen weights; ``"limit"``: the
            model stored low; a float8 preset; or, of ``TORCHAO``, torchao's Float8Linear under
            ``torch.autocast``, compiled by inductor.
        device: ``"cpu"``, or ``"cuda"``, which must be pretended.
        dtype: The low dtype.
        trains: Whether there is a backward.

    Returns:
        The graphs of the ``"first"`` call and of ``"further"`` ones, and what was ``"refreshed"``
        before the first: casts of weights, and the ops of other cached values.
    """
    torch._dynamo.reset()
    mode = FakeTensorMode()
    counter, cache = Counter(mode), FakeCache()
    steps: list[list[Graph]] = []
    stored = dtype if contender == LIMIT else torch.float32
    with torch.device("meta"):
        model = case.build().to(stored)
        if contender in TORCHAO:
            model = converted(model, TORCHAO[contender])
    with mode, torch.device(device):
        _fake_weights_(model)
        args = _inputs(case, stored, trains)
    with (
        _ranks(case.num_ranks),
        mode,
        counter.listening(),
        cache.replacing(),
        replaced((wide_products, "has_product_kernels", lambda _: None)),
        torch.set_grad_enabled(trains),
        torch.autograd.set_multithreading_enabled(False),
    ):
        options: dict[str, Any] = {"backend": counter.inductor}
        if contender in POLICIES:
            given = {"policy": POLICIES[contender], "fallback": False}
            given["freezing"] = contender == FROZEN
            # By default, training on the CPU caches nothing, which moves what native moves.
            given["weight_cache"] = "training"
            options = {"backend": "amp_fx", "options": given}
        compiled = torch.compile(model, **options)
        for _ in range(2):
            with torch.autocast(device, dtype, enabled=contender != LIMIT):
                out = compiled(*args)
            if trains:
                out.backward(torch.empty_like(out))
            steps.append(counter.take())
    first, further = steps
    with mode, torch.no_grad():
        refreshed = cache.casts()
    if contender == FROZEN and not cache.is_packed:
        raise RuntimeError("no value is a constant of the code")
    return {
        "first": [dataclasses.asdict(graph) for graph in first],
        "further": [dataclasses.asdict(graph) for graph in further or first],
        "refreshed": refreshed,
    }


@contextlib.contextmanager
def _ranks(num_ranks: int) -> Iterator[None]:
    """Makes torch in this process believe that it is the first of several ranks.

    Relies on the backend ``"fake"`` of torch's tests, whose collectives do nothing.
    """
    if not num_ranks:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _fake_weights_(model: torch.nn.Module) -> None:
    """Puts fake tensors on the default device in the place of those on ``meta``."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=weight.dtype)
                module._parameters[name] = torch.nn.Parameter(fake, weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _inputs(case: Case, dtype: torch.dtype, trains: bool) -> list[torch.Tensor]:
    x = torch.empty(case.shape, dtype=dtype, requires_grad=trains)
    if not case.num_words:
        return [x]
    return [x, torch.empty(case.shape[:-1], dtype=torch.long)]


def counted_in_process(
    case: str, contenders: Sequence[str], device: str, dtype: str, *, trains: bool, tiny: bool
) -> dict[str, dict[str, Any]]:
    """Counts one model by several contenders in a separate process.

    Returns:
        By contender: the ``Totals`` of the ``"first"`` call after an update and of ``"further"``
        ones as dictionaries, or an ``"error"``.
    """
    job = {"case": case, "device": device, "dtype": dtype, "trains": trains, "tiny": tiny}
    jobs = [{**job, "contender": contender} for contender in contenders]
    answers, error = _answers(jobs)
    answers += [{"error": error}] * (len(jobs) - len(answers))
    return dict(zip(contenders, answers, strict=True))


def _answers(jobs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Returns what the process prints for each job, and why it prints no more."""
    command = [sys.executable, "-m", "tests.traffic.worker", json.dumps(jobs)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, env=environment, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    errors = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
    return [json.loads(line.removeprefix(MARK)) for line in lines], errors[-1]


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Counts one job: ``case``, ``contender``, ``device``, ``dtype``, ``trains`` and ``tiny``."""
    dtype, device = as_dtype(given["dtype"]), given["device"]
    assert dtype is not None
    case = (TINY if given["tiny"] else CASES)[given["case"]]
    counted = count(case, given["contender"], device=device, dtype=dtype, trains=given["trains"])
    first = totals(counted["first"], counted["refreshed"], device)
    further = totals(counted["further"], [], device)
    return {"first": dataclasses.asdict(first), "further": dataclasses.asdict(further)}


def main(jobs: Sequence[dict[str, Any]]) -> None:
    """Prints a line of JSON for each job: its figures, or the error."""
    warnings.simplefilter("ignore")
    if any(job["device"] == "cuda" for job in jobs):
        pretend_cuda()
    for job in jobs:
        try:
            found = run(job)
        except Exception as error:
            log.debug("%s failed", job, exc_info=True)
            first_line = str(error).strip().partition("\n")[0]
            found = {"error": f"{type(error).__name__}: {first_line}"}
        sys.stdout.write(f"{MARK}{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
