"""Dynamo: what it captures, its guards, and the frames that it skips."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import config, pgo, symbolic_convert, trace_rules
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule, _NullDecorator, innermost_backend, skip_code
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    SkipFrame,
    TorchRuntimeError,
    Unsupported,
)
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalStateSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = (
    "BackendCompilerFailed",
    "BundledAOTAutogradSerializableCallable",
    "GlobalStateSource",
    "GuardBuilder",
    "InstructionTranslator",
    "LocalSource",
    "OptimizedModule",
    "RestartAnalysis",
    "SerializableCallable",
    "SkipFrame",
    "TorchRuntimeError",
    "Unsupported",
    "compile_lock",
    "config",
    "counters",
    "innermost_backend",
    "install_guard",
    "pgo",
    "skip_code",
    "trace_rules",
)

NullDecorator = _NullDecorator
compile_session = torch.compiler._compile_session_context
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
