"""``amp_fx.store_low``."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.dtypes import dtype_name
from amp_fx.errors import ArgumentTypeError, UnsupportedError
from amp_fx.explanation.entry import label
from amp_fx.explanation.running import is_usable, leaf_tensors, module_tensors, target_device
from amp_fx.front.settings import unwrap
from amp_fx.graphs.policy_mode import ambient_policy
from amp_fx.options import check_device_dtype, default_dtype, to_dtype
from amp_fx.policies.policy import as_policy, preset
from amp_fx.progress import working
from amp_fx.regions.state import no_autocast
from amp_fx.second_call import takes_inputs_later
from amp_fx.stored.analysis import Call, named_weights, reasons_to_stay, store
from amp_fx.stored.report import StorageReport, StoredWeight
from amp_fx.weights.stored_low import forget, mark_stored

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from amp_fx.policies.policy import Policy

log = logging.getLogger(__name__)


@takes_inputs_later
def store_low(
    model: nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] = "torch",
) -> Callable[..., StorageReport]:
    """Stores the weights of a model in low precision for inference, with identical results.

    ``amp_fx.store_low(model)(x)`` converts in place each parameter and buffer that is only read
    through casts to the low dtype. Weights that are read in float32, such as those of norms, are
    not converted. In a region with the same dtype and policy, the model returns the same bits as
    before, compiled or not; it does not run outside of such a region. Graphs that amp_fx compiles
    do not pack these weights, which would take additional memory, unless
    ``options={"freezing": True}`` requests it.

    The analysis explains the compiled program, and runs copies of the model eagerly, one at a time:
    it finds reads without a cast, and excludes weights whose dtype changes a bit of the results. A
    model on the ``meta`` device is run on fake tensors, which only shows dtypes and shapes. Only
    one call is analyzed, so pass representative arguments. Tied weights, and weights of modules
    with hooks or parametrizations, are not converted; no weight is if a graph falls back.
    ``model.state_dict()`` contains the low weights, and ``load_state_dict`` rounds float32 weights.

    Args:
        model: A module in evaluation mode. For a compiled module, its original is converted.
        dtype: The low dtype of the region, or its name. Defaults to the dtype of the region around
            the call of ``store_low``, else the policy's, else the default of ``amp_fx.compile``.
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
        OptionError: The dtype is not a low dtype.
        PolicyError: The policy is invalid.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"amp_fx.store_low expects a torch.nn.Module, got {model!r}")
    target, settings = unwrap(model, "amp_fx.store_low")
    assert isinstance(target, nn.Module)
    low_dtype = settings.dtype if dtype is None else to_dtype("dtype", dtype)
    resolved = as_policy(policy)
    if resolved == preset("torch"):
        resolved = settings.policy or ambient_policy() or resolved
    _reject_training(target)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def store_call(*args: Any, **kwargs: Any) -> StorageReport:
        _reject_training(target)
        with working(f"storing the weights of {type(target).__name__}"):
            return _store(target, low_dtype, resolved, args, kwargs)

    return store_call


def _reject_training(model: nn.Module) -> None:
    names = [name for name, module in model.named_modules() if module.training]
    if names:
        module_name = f"its module {names[0]!r}" if names[0] else "it"
        raise UnsupportedError(
            f"{type(model).__name__} cannot be stored in low precision: {module_name} is in "
            "training mode, and updates are too small for low-precision weights. Call model.eval() "
            "first"
        )
    with_gradients = [name for name, p in model.named_parameters() if p.grad is not None]
    if with_gradients:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be stored in low precision: {with_gradients[0]} has a "
            "gradient, as in training. Call model.zero_grad() first"
        )


def _store(
    model: nn.Module,
    dtype: torch.dtype | None,
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StorageReport:
    device_type = _device_type(model, args, kwargs)
    dtype = dtype or _low_dtype(device_type, policy)
    check_device_dtype(device_type, dtype)
    with no_autocast():
        region = functools.partial(torch.autocast, device_type, dtype)
        reasons = reasons_to_stay(Call(model, args, kwargs, device_type, dtype, policy, region))
    weights = _replace(model, reasons, dtype)
    report = StorageReport(
        model=type(model).__name__,
        policy=label(policy),
        dtype=dtype_name(dtype),
        device_type=device_type,
        weights=weights,
    )
    if not report.stored:
        main = max(weights, key=lambda weight: weight.bytes_before, default=None)
        reason = "it has no weights" if main is None else main.reason
        log.warning("no weight of %s was stored low: %s", report.model, reason)
    return report


def _device_type(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the device type of the tensors; for ``meta``, that of an available device."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    target = target_device({tensor.device.type for tensor in tensors})
    return target if target == "cpu" or is_usable(target) else "cpu"


def _low_dtype(device_type: str, policy: Policy) -> torch.dtype:
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return policy.low_dtype(device_type) or default_dtype(device_type, warns=True)


def _replace(
    model: nn.Module, reasons: Mapping[str, str], dtype: torch.dtype
) -> tuple[StoredWeight, ...]:
    """Stores the weights without a reason one by one; returns the records of all weights."""
    records: dict[int, StoredWeight] = {}
    for name, tensor in named_weights(model).items():
        if id(tensor) in records:
            continue
        before = tensor.dtype, tensor.numel() * tensor.element_size()
        if not reasons[name]:
            forget(tensor)
            store(tensor, dtype)
            owner, _, attribute = name.rpartition(".")
            mark_stored(model.get_submodule(owner), attribute)
        records[id(tensor)] = StoredWeight(
            path=name,
            shape=tuple(tensor.shape),
            dtype_before=dtype_name(before[0]),
            dtype=dtype_name(tensor.dtype),
            bytes_before=before[1],
            bytes=tensor.numel() * tensor.element_size(),
            reason=reasons[name],
        )
    return tuple(records.values())
