"""The optimizer that ``torch.onnx`` applies to its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def without_folded_batch_norms() -> AbstractContextManager[None]:
    """Context in which ``torch.onnx.export`` does not fold batch norms into weights.

    Folding gives float32 weights to low convolutions, and the model is invalid. Relies on
    ``onnxscript.rewriter._DEFAULT_REWRITE_RULES``, which contains the rules of ``_fuse_batchnorm``.
    """
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _fuse_batchnorm

    folding = {id(rule) for rule in _fuse_batchnorm.rules}
    kept = tuple(rule for rule in rewriter._DEFAULT_REWRITE_RULES if id(rule) not in folding)
    return replaced((rewriter, "_DEFAULT_REWRITE_RULES", kept))
