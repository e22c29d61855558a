"""Dynamo: what it captures, its guards, and the frames that it skips."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import config, eval_frame, pgo, symbolic_convert, trace_rules
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)
from torch._dynamo.eval_frame import OptimizedModule, _NullDecorator, innermost_backend, skip_code
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    SkipFrame,
    TorchRuntimeError,
    Unsupported,
)
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GetItemSource, GlobalStateSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._guards import ChainedSource, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

__all__ = (
    "BackendCompilerFailed",
    "BundledAOTAutogradSerializableCallable",
    "GlobalStateSource",
    "GuardBuilder",
    "InstructionTranslator",
    "OptimizedModule",
    "RestartAnalysis",
    "SerializableCallable",
    "SkipFrame",
    "Source",
    "TorchRuntimeError",
    "Unsupported",
    "config",
    "counters",
    "innermost_backend",
    "install_guard",
    "pgo",
    "skip_code",
    "trace_rules",
)

NullDecorator = _NullDecorator
optimize = torch._dynamo.optimize


def current_translator() -> InstructionTranslator | None:
    """Returns the translator of the frame that is traced in this thread, or None."""
    return getattr(symbolic_convert.tls, "current_tx", None)


def describe_frame() -> str | None:
    """Returns the name and line of the function that Dynamo compiles in this thread.

    Returns None without such a function, and if Dynamo raises an error when it may not compile the
    function again (``fullgraph=True``).
    """
    translator = current_translator()
    if translator is None or translator.one_graph:
        return None
    code = translator.f_code
    return f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"


def call_at_recompile_limit(function: Callable[[str, str], None]) -> None:
    """Calls a function when Dynamo stops compiling a frame because it has too many variants.

    Relies on the warning that ``_compile`` in ``torch._dynamo.convert_frame`` logs then, whose
    arguments are the name of the limit, the limit, and the text of ``describe_frame``.

    Args:
        function: Called with the text of ``describe_frame``, and with the limit.
    """

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("torch._dynamo hit config.%s") and record.args:
                name, limit, frame, *_ = record.args
                function(str(frame), f"{name} ({limit})")

    logging.getLogger("torch._dynamo.convert_frame").addHandler(Handler())


def compiled_call(frame: FrameType) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Returns the function that was compiled, and its arguments, from the frame of a call of it.

    Relies on ``compile_wrapper`` in ``torch._dynamo.eval_frame``, which calls the function as
    ``fn``. Returns None for other frames.
    """
    code = frame.f_code
    if code.co_name != "compile_wrapper" or code.co_filename != eval_frame.__file__:
        return None
    values = frame.f_locals
    return values["fn"], values["args"], values["kwargs"]


def call_instead(
    compiled: Any, replace: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replaces the function that a function of ``torch.compile`` calls.

    Relies on the variable ``fn`` of the function that ``torch.compile`` returns, which no program
    sees.

    Args:
        compiled: What ``torch.compile`` returned for a function.
        replace: Returns the other function, given the original one.

    Returns:
        A function that restores the original one.
    """
    cell = compiled.__closure__[compiled.__code__.co_freevars.index("fn")]
    original = cell.cell_contents
    cell.cell_contents = replace(original)

    def restore() -> None:
        cell.cell_contents = original

    return restore


def source_chain(source: Source | None) -> list[Source]:
    """Returns a variable's source and the sources it is based on, the outermost variable first."""
    chain = [] if source is None else [source]
    while chain and isinstance(chain[-1], ChainedSource):
        chain.append(chain[-1].base)
    return chain[::-1]


def local_source(code: CodeType, name: str, index: int | None = None) -> Source:
    """Returns the source of a local variable or, given an index, of an item of it."""
    source = LocalSource(name, is_derefed_cell_contents=name in code.co_freevars)
    return source if index is None else GetItemSource(source, index)


def is_resumed(code: CodeType, function: CodeType) -> bool:
    """Returns True if a code resumes a function after a graph break.

    Relies on the name that Dynamo gives to such code, and on its first line, which is in the
    function.
    """
    is_inside = code.co_filename == function.co_filename and any(
        line == code.co_firstlineno for _, _, line in function.co_lines()
    )
    return is_inside and code.co_name.startswith(f"torch_dynamo_resume_in_{function.co_name}_at_")


def captured_function_modes() -> list[Any]:
    """Returns the function modes around the frame that Dynamo is compiling in this thread."""
    return torch_function_mode_stack_state_mgr.stack


def skip_frames(functions: Iterable[Callable[..., Any]]) -> None:
    """Makes Dynamo skip the frames of functions, which may still be inlined."""
    for function in functions:
        skip_code(inspect.unwrap(function).__code__)


def skip_this_call(error: Any) -> None:
    """Limits the effect of an exception of Dynamo to the call that raised it.

    torch 2.15 added ``apply_to_code``, which determines whether later calls are skipped as well.
    """
    error.frame_exec_strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.SKIP)
    error.apply_to_code = False
