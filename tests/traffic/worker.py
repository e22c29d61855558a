"""Counts a model that one of the contenders compiled."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.devices import wide_products
from amp_fx.replaced import replaced
from amp_fx.tables.float8 import FLOAT8_PRESETS, RECIPES
from tests.float8.torchao_oracle import converted
from tests.traffic.cached import FakeCache
from tests.traffic.counting import Counter
from tests.traffic.totals import totals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.traffic.counting import Graph
    from tests.traffic.models import Case
    from tests.traffic.totals import Totals

NATIVE, AMP_FX, FROZEN, LEAN, LIMIT = "native", "amp_fx", "frozen", "lean", "limit"
CONTENDERS = (NATIVE, AMP_FX, LEAN, LIMIT)
POLICIES = {AMP_FX: "torch", FROZEN: "torch", LEAN: "lean"}
POLICIES |= {preset: preset for preset in FLOAT8_PRESETS}
TORCHAO = {f"torchao-{recipe}": recipe for recipe in RECIPES}


def count(
    case: Case, contender: str, *, device: str, dtype: torch.dtype, trains: bool
) -> tuple[Totals, Totals]:
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
        The sums of the first call after an update of the weights, which includes the refresh of
        cached values, and of further ones.
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
    return totals(first, refreshed, device), totals(further or first, [], device)


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
