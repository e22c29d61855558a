"""Compiles one model in this process and prints the seconds as JSON.

The case ``compile-time`` runs ``python -m amp_fx.bench.compile_worker JSON``.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.entry import amp_fx
from amp_fx.bench.cases.models import build_training, train_size
from amp_fx.bench.contenders import BY_NAME, compiling, region_of
from amp_fx.bench.settings import Settings
from amp_fx.demo.train import wait_for
from amp_fx.weights.engine import engine

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 256


def main(given: dict[str, Any]) -> dict[str, float]:
    """Compiles the forward and backward of a GPT, or its forward for inference.

    Args:
        given: ``contender``, ``layers``, ``compiler``, ``device``, ``dtype``, ``tiny`` and
            ``is_inference``.

    Returns:
        ``seconds`` until the end of the first step or call, and ``own_seconds`` in amp_fx's
        backend. The latter exclude the inner compiler if ``compiler`` is ``"eager"``.
    """
    settings = Settings(
        torch.device(given["device"]),
        getattr(torch, given["dtype"]),
        given["compiler"],
        layers=given["layers"],
        tiny=given["tiny"],
    )
    size = train_size(settings)
    with settings.device:
        model = build_training(NUM_TOKENS, size)
        tokens = torch.randint(NUM_TOKENS, (1, size.context))
    # Do not count the initialization of libraries, the import of inductor, and the compilation of
    # the C++ engine, which takes about 10 seconds once per machine.
    model(tokens, tokens).backward()
    model.zero_grad()
    importlib.import_module("torch._inductor.compile_fx")
    engine()
    spent: list[float] = []
    contender, is_inference = BY_NAME[given["contender"]], given["is_inference"]
    backend = _timed(settings, spent) if contender.is_amp_fx else settings.compiler
    compiled = torch.compile(model.train(not is_inference), backend=backend)
    start = time.perf_counter()
    with torch.set_grad_enabled(not is_inference), compiling(contender):
        with region_of(contender, settings):
            loss = compiled(tokens, tokens)
        if not is_inference:
            loss.backward()
    wait_for(settings.device)
    return {"seconds": time.perf_counter() - start, "own_seconds": sum(spent)}


def _timed(settings: Settings, spent: list[float]) -> Callable[..., Any]:
    """Returns the backend, wrapped to append the seconds of each call to a list."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        options = {"dtype": settings.dtype, "compiler": settings.compiler}
        compiled = amp_fx(gm, example_inputs, options=options)
        spent.append(time.perf_counter() - start)
        return compiled

    return backend


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
