"""``amp_fx.record``: writes the results of a step into a file, to compare it with other runs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import ArgumentTypeError, OptionError
from amp_fx.front.settings import unwrap
from amp_fx.graphs.locations import NodeLocation
from amp_fx.numerics.asked import name_of
from amp_fx.numerics.own_casts import regions_of_compiled
from amp_fx.numerics.trace import Trace, TraceSink, is_traced
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.step import Step
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later
from amp_fx.weights.spread import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable


@takes_inputs_later
def record(
    step: Callable[..., Any], path: str | os.PathLike[str] | None = None
) -> Callable[..., Trace]:
    """Records each op of a step: its module, its line, its dtype and a sample of its result.

    ``amp_fx.record(step, "a.trace")(*inputs)`` runs the step once, op by op, forward and backward,
    and writes a file. ``python -m amp_fx diff a.trace b.trace`` compares two files, which may be
    of different versions of torch or of different machines. Code that is compiled runs eagerly,
    with the same casts; under a policy it follows ``torch.autocast``, and a warning says so.
    ``amp_fx.verify`` compares compiled code with eager code. State and random numbers are restored.

    Args:
        step: A module or a function. If it does not call ``backward``, outputs that require
            gradients are differentiated with random cotangents, a scalar with 1.
        path: The file; None writes none.

    Returns:
        A function that takes the step's arguments and returns a ``Trace``, whose ``diff`` compares
        it with another one.

    Raises:
        OptionError: The folder of the file does not exist.
        ArgumentTypeError: The step is neither a module nor a function, or the path is not a path.
    """
    target, _ = unwrap(step, "amp_fx.record")
    if path is not None:
        _check_path(path)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def record_call(*args: Any, **kwargs: Any) -> Trace:
        name = f"{name_of(target)}, torch {torch.__version__}"
        trace = Trace(name)
        program = Step(target, args, kwargs)
        with (
            working(f"recording {name_of(target)}"),
            program.undisturbed(is_eager=True),
            regions_of_compiled(step),
        ):
            recorder = Recorder(program.guard, program.paths, TraceSink(trace))
            outcome = program.run(step, recorder.observing)
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
