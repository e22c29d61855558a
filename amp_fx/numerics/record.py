"""``amp_fx.record``: writes the results of a step into a file, to compare it with other runs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import ArgumentTypeError, OptionError
from amp_fx.explanation.running import isolated
from amp_fx.front.settings import unwrap
from amp_fx.graphs.locations import NodeLocation
from amp_fx.numerics.asked import name_of
from amp_fx.numerics.graph_trace import traced
from amp_fx.numerics.own_casts import regions_of_compiled, with_own_casts
from amp_fx.numerics.trace import SAMPLE, Trace, TraceSink, is_traced
from amp_fx.observe.compiled import backend_of, compiled_with
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.step import Step
from amp_fx.options import Options
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later
from amp_fx.weights.spread import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.front.settings import RegionSettings
    from amp_fx.observe.step import Outcome


@takes_inputs_later
def record(
    step: Callable[..., Any],
    path: str | os.PathLike[str] | None = None,
    compiler: str | None = None,
) -> Callable[..., Trace]:
    """Records each op of a step: its module, its line, its dtype and a sample of its result.

    ``amp_fx.record(step, "a.trace")(*inputs)`` runs the step once, op by op, forward and backward,
    and writes a file. ``python -m amp_fx diff a.trace b.trace`` compares two files, which may be
    of different versions of torch, of different machines, or of eager and compiled code. Code
    that is compiled runs eagerly, with the same casts; under a policy it follows
    ``torch.autocast``, and a warning says so. State and random numbers are restored.

    Args:
        step: A module or a function. If it does not call ``backward``, outputs that require
            gradients are differentiated with random cotangents, a scalar with 1.
        path: The file; None writes none.
        compiler: The inner compiler of amp_fx that compiles the step, such as ``"inductor"``. The
            graphs then return the value of each op, so that kernels write all values.

    Returns:
        A function that takes the step's arguments and returns a ``Trace``, whose ``diff`` compares
        it with another one.

    Raises:
        OptionError: The compiler is unknown, or the folder of the file does not exist.
        ArgumentTypeError: The step is neither a module nor a function, or the path is not a path.
    """
    target, settings = unwrap(step, "amp_fx.record")
    if path is not None:
        _check_path(path)
    if compiler is not None:
        Options.parse({"compiler": compiler})
    how = "eager" if compiler is None else f"compiled by {compiler}"

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def record_call(*args: Any, **kwargs: Any) -> Trace:
        name = f"{name_of(target)}, {how}, torch {torch.__version__}"
        trace = Trace(name, SAMPLE)
        program = Step(target, args, kwargs)
        with (
            working(f"recording {name_of(target)}"),
            program.undisturbed(is_eager=compiler is None),
        ):
            if compiler is None:
                outcome = _eagerly(program, trace, with_own_casts(step, target, settings))
            else:
                outcome = _compiled(program, trace, step, settings, compiler)
            for what, value in zip(outcome, parts_of([*outcome.values()]), strict=True):
                if what.startswith(("output", "gradient")) and is_traced(value):
                    trace.add("result", NodeLocation(), what, value)
        if path is not None:
            trace.save(path)
        return trace

    return record_call


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path must be the path of a file, got {type(path).__name__}")
    if not Path(path).parent.is_dir():
        raise OptionError(
            f"path={str(path)!r}: the folder {str(Path(path).parent)!r} does not exist"
        )


def _eagerly(program: Step, trace: Trace, call: Callable[..., Any]) -> Outcome:
    """Runs a step op by op."""
    with regions_of_compiled(program.function):
        return program.run(call, Recorder(program.guard, program.paths, TraceSink(trace)).observing)


def _compiled(
    program: Step, trace: Trace, step: Any, settings: RegionSettings, compiler: str
) -> Outcome:
    """Compiles a step, by the options that it was compiled with, and runs it."""
    given, dynamic = compiled_with(step)
    has_region = getattr(step, "_amp_fx_settings", None) is not None
    is_rewritten = has_region or backend_of(step) is not None
    options = Options.parse({**given, "compiler": compiler})
    call = traced(program.function, trace, options, is_rewritten=is_rewritten, dynamic=dynamic)
    if has_region:
        call = settings.wrap(call, None)
    with isolated():
        return program.run(call)
