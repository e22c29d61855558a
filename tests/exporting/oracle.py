"""Runs the subjects of model parity through ``amp_fx.export``, and reports different bits.

The oracle is eager ``torch.autocast``, as in ``tests.parity.oracle``. ``torch.export`` changes a
few programs by itself: if the direct comparison differs, the program that it exports without amp_fx
runs in eager autocast. If that differs from the eager model as well, amp_fx is compared with it
instead.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import amp_fx
from amp_fx.regions.state import no_autocast
from tests.parity import oracle
from tests.parity.oracle import Result, Subject, Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram


class Called(nn.Module):
    """A function as a module; the tensors of ``module`` are its own."""

    def __init__(self, program: Callable[..., Any], module: nn.Module | None) -> None:
        super().__init__()
        self.program = program
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)


class NotExportableError(Exception):
    """``torch.export`` cannot take a model, with or without amp_fx."""


class Exported:
    """Exports a program when it is called with arguments of new shapes, and runs that."""

    def __init__(
        self, subject: Subject, make: Callable[..., ExportedProgram], *, is_rewritten: bool
    ) -> None:
        self.is_rewritten = is_rewritten
        program = subject.program
        is_module = isinstance(program, nn.Module)
        self.model = program if is_module else Called(program, subject.module)
        self.make = make
        self.made: dict[Any, nn.Module] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = spec, tuple(getattr(leaf, "shape", leaf) for leaf in leaves)
        if key not in self.made:
            with torch.random.fork_rng(devices=()):
                self.made[key] = self.make(self.model, args, kwargs).module()
        with no_autocast() if self.is_rewritten else contextlib.nullcontext():
            return self.made[key](*args, **kwargs)


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    """Returns a program that has been in a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue()))


def check(
    build: Callable[[], Subject], way: Way, dtype: torch.dtype, *, is_saved: bool
) -> str | None:
    """Describes how an exported program differs from the oracle; None if it does not.

    Raises:
        NotExportableError: torch cannot export the model either.
    """

    def ours(model: nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
        if way is Way.AMBIENT:
            program = amp_fx.export(model, args, kwargs)
        else:
            program = amp_fx.export(model, args, kwargs, dtype=dtype)
        return saved_and_loaded(program) if is_saved else program

    def native(model: nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
        with torch.no_grad(), oracle.region_of("cpu", torch.bfloat16, enabled=False):
            return torch.export.export(model, args, kwargs, strict=False)

    def run(make: Callable[..., ExportedProgram], region: torch.dtype | None) -> Result:
        subject = build()
        subject.program = Exported(subject, make, is_rewritten=make is ours)
        return oracle.run(subject, region, differentiate=False)

    expected = oracle.run_eager(build(), build(), way, dtype)
    expected.grads = None
    try:
        actual = run(ours, dtype if way is Way.AMBIENT else None)
    except Exception:
        with contextlib.suppress(amp_fx.errors.AmpFxError):
            try:
                run(native, None)
            except Exception as error:
                raise NotExportableError(str(error)) from error
        raise
    found = difference(expected, actual)
    if found is None:
        return None
    plain = build()
    outputs: list[Any] = []
    if way is Way.BARE:
        oracle.run(plain, None, record=outputs, differentiate=False)
    subject = build()
    subject.program = Exported(subject, native, is_rewritten=False)
    reference = oracle.run(
        subject, dtype, cast_to=iter(outputs) if way is Way.BARE else None, differentiate=False
    )
    if difference(expected, reference) is None:
        return found
    against = difference(reference, actual)
    return against and f"against torch.export's own program: {against}"


def difference(expected: Result, actual: Result) -> str | None:
    """Describes the first output that differs; an exported program has separate buffers."""
    for i, (a, b) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        found = oracle.leaf_difference(a, b)
        if found:
            return f"output {i}: {found}"
    return None
