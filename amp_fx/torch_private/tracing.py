"""Compilation contexts, and the tracer of ``make_fx``."""

from __future__ import annotations

from torch._guards import CompileContext, Guard, TracingContext
from torch._logging._internal import trace_structured
from torch.fx.experimental.proxy_tensor import _MakefxTracer

__all__ = ("CompileContext", "Guard", "TracingContext", "trace_structured")

MakefxTracer = _MakefxTracer
