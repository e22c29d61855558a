"""``amp_fx.store_low``."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.dtypes import dtype_name
from amp_fx.errors import ArgumentTypeError, UnsupportedError
from amp_fx.explanation.entry import explain
from amp_fx.front.settings import policy_for, unwrap
from amp_fx.progress import working
from amp_fx.regions.state import no_autocast
from amp_fx.second_call import takes_inputs_later
from amp_fx.stored.analysis import Call, named_weights, reasons_to_stay, store
from amp_fx.stored.report import StorageReport, StoredWeight
from amp_fx.weights.stored_low import forget, mark_stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy

log = logging.getLogger(__name__)


@takes_inputs_later
def store_low(
    model: nn.Module, *, dtype: torch.dtype | str | None = None, policy: Policy | str | None = None
) -> Callable[..., StorageReport]:
    """Stores the weights of a model in low precision for inference, with identical results.

    ``amp_fx.store_low(model)(x)`` converts in place each parameter and buffer that is only read
    through casts to the low dtype. Weights that are read in float32, such as those of norms, are
    not converted. In a region with the same dtype and policy, the model returns the same bits as
    before, compiled or not; it does not run outside of such a region. Graphs that amp_fx compiles
    do not pack these weights, which would take additional memory, unless
    ``options={"freezing": True}`` requests it.

    The analysis explains the compiled program, which shows reads without a cast. Then it runs
    copies of the model eagerly, one at a time, and excludes weights whose dtype changes a bit of
    the results. A model on the ``meta`` device is run on fake tensors, which only shows dtypes and
    shapes. Only one call is analyzed, so pass representative arguments. Tied weights, and weights
    of modules with hooks or parametrizations, are not converted; no weight is if a graph falls
    back. ``model.state_dict()`` contains the low weights, and ``load_state_dict`` rounds float32
    weights.

    Args:
        model: A module in evaluation mode. For a compiled module, its original is converted.
        dtype: The low dtype of the region, or its name. Defaults to the dtype of ``amp_fx.compile``
            or of the region around the call, as for ``amp_fx.explain``.
        policy: The policy of the region: a ``Policy``, the name of a preset or the path of a policy
            file. Defaults to the policy of ``amp_fx.compile`` or of the surrounding region, else
            PyTorch's.

    Returns:
        A function that receives the arguments of the model, converts the weights and returns a
        ``StorageReport``.

    Raises:
        ArgumentTypeError: The model is not a module.
        UnsupportedError: The model is in training mode, or a parameter has a gradient. Raised by
            the call, without any change, if the model cannot be traced with its arguments.
        OptionError: Raised by the call if the dtype is not a low dtype.
        PolicyError: Raised by the call if the policy is invalid.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"amp_fx.store_low expects a torch.nn.Module, got {model!r}")
    target, settings = unwrap(model, "amp_fx.store_low")
    assert isinstance(target, nn.Module)
    _reject_training(target)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def store_call(*args: Any, **kwargs: Any) -> StorageReport:
        _reject_training(target)

        explain_call = explain(
            target,
            dtype=settings.dtype if dtype is None else dtype,
            policy=policy_for(policy, settings),
            device_type=settings.device_type,
            # Cached casts of weights would look like other readers.
            options={"weight_cache": False},
        )
        is_ambient = contextlib.nullcontext() if dtype is None else no_autocast()
        with working(f"storing the weights of {type(target).__name__}"):
            with is_ambient, torch.no_grad():
                explanation = explain_call(*args, **kwargs)
            return _store(Call(target, args, kwargs, explanation))

    return store_call


def _reject_training(model: nn.Module) -> None:
    modules = [name for name, module in model.named_modules() if module.training]
    graded = [name for name, p in model.named_parameters() if p.grad is not None]
    signs = [f"its module {name!r} is in training mode" for name in modules]
    signs += [f"{name} has a gradient" for name in graded]
    if signs:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be stored in low precision: {signs[0]}, and updates "
            "are too small for low-precision weights. Call model.eval() and model.zero_grad() first"
        )


def _store(call: Call) -> StorageReport:
    """Stores the weights without a reason one by one."""
    reasons, records = reasons_to_stay(call), dict[int, StoredWeight]()
    for name, tensor in named_weights(call.model).items():
        if id(tensor) in records:
            continue
        before = tensor.dtype, tensor.numel() * tensor.element_size()
        if not reasons[name]:
            forget(tensor)
            store(tensor, call.dtype)
            owner, _, attribute = name.rpartition(".")
            mark_stored(call.model.get_submodule(owner), attribute)
        records[id(tensor)] = StoredWeight(
            path=name,
            shape=tuple(tensor.shape),
            dtype_before=dtype_name(before[0]),
            dtype=dtype_name(tensor.dtype),
            bytes_before=before[1],
            bytes=tensor.numel() * tensor.element_size(),
            reason=reasons[name],
        )
    explanation = call.explanation
    report = StorageReport(
        model=explanation.model,
        policy=explanation.policy,
        dtype=explanation.dtype,
        device_type=explanation.device_type,
        weights=tuple(records.values()),
    )
    if not report.stored:
        main = max(report.weights, key=lambda weight: weight.bytes_before, default=None)
        reason = "it has no weights" if main is None else main.reason
        log.warning("no weight of %s was stored low: %s", report.model, reason)
    return report
