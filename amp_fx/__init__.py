"""Automatic mixed precision as a compiler pass for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_fx import stats as stats
    from amp_fx import weight_cache
    from amp_fx.accelerators.conformance import conformance
    from amp_fx.accelerators.report import ConformanceReport
    from amp_fx.backend.added_passes import register_pass
    from amp_fx.drawing.draw import draw
    from amp_fx.eager.custom_function import custom_bwd, custom_fwd
    from amp_fx.eager.region import autocast
    from amp_fx.explanation.entry import explain
    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.network import to_networkx
    from amp_fx.exporting.entry import export, package
    from amp_fx.exporting.onnx_file import for_onnx, to_onnx
    from amp_fx.front.compile import compile  # noqa: A004
    from amp_fx.grad_scaler import GradScaler
    from amp_fx.graphs.purity import register_pure_op
    from amp_fx.integrations.fsdp import fsdp_policy
    from amp_fx.numerics.audit.entry import audit
    from amp_fx.numerics.audit.report import AuditReport
    from amp_fx.numerics.entry import accuracy
    from amp_fx.numerics.record import record
    from amp_fx.numerics.report import AccuracyReport
    from amp_fx.numerics.search import search
    from amp_fx.numerics.search_result import SearchResult
    from amp_fx.numerics.trace import Trace
    from amp_fx.numerics.trace_diff import TraceDiff
    from amp_fx.numerics.verify import verify
    from amp_fx.numerics.verify_report import VerifyReport
    from amp_fx.policies.policy import Policy, preset
    from amp_fx.regions.registered_ops import register_device, register_op
    from amp_fx.stored.entry import store_low
    from amp_fx.stored.report import StorageReport
    from amp_fx.tables.cast_policy import CastPolicy
    from amp_fx.weights.keep import Keep, keep

__version__ = "0.3.0"

__all__ = [
    "AccuracyReport",
    "AuditReport",
    "CastPolicy",
    "ConformanceReport",
    "Explanation",
    "GradScaler",
    "Keep",
    "Policy",
    "SearchResult",
    "StorageReport",
    "Trace",
    "TraceDiff",
    "VerifyReport",
    "__version__",
    "accuracy",
    "audit",
    "autocast",
    "compile",
    "conformance",
    "custom_bwd",
    "custom_fwd",
    "draw",
    "explain",
    "export",
    "for_onnx",
    "fsdp_policy",
    "keep",
    "package",
    "preset",
    "record",
    "register_device",
    "register_op",
    "register_pass",
    "register_pure_op",
    "search",
    "store_low",
    "to_networkx",
    "to_onnx",
    "verify",
    "weight_cache",
]

_MODULES = {
    "AccuracyReport": "amp_fx.numerics.report",
    "AuditReport": "amp_fx.numerics.audit.report",
    "CastPolicy": "amp_fx.tables.cast_policy",
    "ConformanceReport": "amp_fx.accelerators.report",
    "Explanation": "amp_fx.explanation.explanation",
    "GradScaler": "amp_fx.grad_scaler",
    "Keep": "amp_fx.weights.keep",
    "Policy": "amp_fx.policies.policy",
    "SearchResult": "amp_fx.numerics.search_result",
    "StorageReport": "amp_fx.stored.report",
    "Trace": "amp_fx.numerics.trace",
    "TraceDiff": "amp_fx.numerics.trace_diff",
    "VerifyReport": "amp_fx.numerics.verify_report",
    "accuracy": "amp_fx.numerics.entry",
    "audit": "amp_fx.numerics.audit.entry",
    "autocast": "amp_fx.eager.region",
    "compile": "amp_fx.front.compile",
    "conformance": "amp_fx.accelerators.conformance",
    "custom_bwd": "amp_fx.eager.custom_function",
    "custom_fwd": "amp_fx.eager.custom_function",
    "draw": "amp_fx.drawing.draw",
    "explain": "amp_fx.explanation.entry",
    "export": "amp_fx.exporting.entry",
    "for_onnx": "amp_fx.exporting.onnx_file",
    "fsdp_policy": "amp_fx.integrations.fsdp",
    "keep": "amp_fx.weights.keep",
    "package": "amp_fx.exporting.entry",
    "preset": "amp_fx.policies.policy",
    "record": "amp_fx.numerics.record",
    "register_device": "amp_fx.regions.registered_ops",
    "register_op": "amp_fx.regions.registered_ops",
    "register_pass": "amp_fx.backend.added_passes",
    "register_pure_op": "amp_fx.graphs.purity",
    "search": "amp_fx.numerics.search",
    "store_low": "amp_fx.stored.entry",
    "to_networkx": "amp_fx.explanation.network",
    "to_onnx": "amp_fx.exporting.onnx_file",
    "verify": "amp_fx.numerics.verify",
}
"""Modules that define the public names, imported at the first use of a name.

``python -m amp_fx --help`` therefore does not import torch, and ``import amp_fx`` does not import
Dynamo, networkx or rich.
"""

_SUBMODULES = ("errors", "integrations", "options", "stats", "weight_cache")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"amp_fx.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_SUBMODULES})
