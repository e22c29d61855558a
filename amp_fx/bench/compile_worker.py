"""Compiles one model in this process and prints how long that took, as JSON.

``python -m amp_fx.bench.compile_worker JSON`` is what the case ``compile-time`` starts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend import amp_fx
from amp_fx.bench.cases.gpt import build_training, train_size
from amp_fx.bench.settings import Settings
from amp_fx.bench.timing import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 256


def main(given: dict[str, Any]) -> dict[str, float]:
    """Compiles forward and backward of a GPT.

    Args:
        given: ``contender``, ``layers``, ``compiler``, ``device``, ``dtype`` and ``tiny``.

    Returns:
        ``seconds`` to the end of the first step, and ``own_seconds`` inside amp_fx, which
        are its own if ``compiler`` is ``"eager"``.
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
    model(tokens, tokens).backward()  # what libraries do when they are first called
    model.zero_grad()
    # torch.compile imports inductor when called, our backend with the first graph: not counted.
    importlib.import_module("torch._inductor.compile_fx")
    spent: list[float] = []
    region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if given["contender"] == "amp_fx":
        compiled = torch.compile(model, backend=_timed(settings, spent))
    else:
        compiled = torch.compile(model, backend=settings.compiler)
        region = torch.autocast(settings.device.type, settings.dtype)
    start = time.perf_counter()
    with region:
        loss = compiled(tokens, tokens)
    loss.backward()
    wait_for(settings.device)
    return {"seconds": time.perf_counter() - start, "own_seconds": sum(spent)}


def _timed(settings: Settings, spent: list[float]) -> Callable[..., Any]:
    """The backend, which adds the seconds of each of its calls to a list."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        options = {"dtype": settings.dtype, "compiler": settings.compiler}
        compiled = amp_fx(gm, example_inputs, options=options)
        spent.append(time.perf_counter() - start)
        return compiled

    return backend


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
