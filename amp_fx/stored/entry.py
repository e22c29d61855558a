"""``amp_fx.store_low``."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.dtypes import dtype_name
from amp_fx.eager.region import autocast
from amp_fx.errors import ArgumentTypeError, UnsupportedError
from amp_fx.explanation.entry import label
from amp_fx.explanation.running import is_usable, leaf_tensors, module_tensors, target_device
from amp_fx.front.settings import as_dtype, unwrap
from amp_fx.graphs.policy_mode import ambient_policy
from amp_fx.options import check_device_dtype, default_dtype
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
    """Stores the weights of a model for inference in the low dtype that they are read in.

    ``amp_fx.store_low(model)(x)`` makes, in place, each parameter and buffer low that every reader
    takes through a cast to that dtype, and leaves what is read in float32, such as the weights
    of norms. Under a region of that dtype and policy the model gives the same bits as before,
    compiled or not; outside of one it does not run. Nothing is kept besides: in graphs that amp_fx
    compiles, weights stored so are not packed unless ``options={"freezing": True}`` asks for it.

    Nothing is computed: fake tensors go through Dynamo and through eager code, before and after,
    and what is done is refused for weights whose dtype would change what the program does.
    Only a program that looks at numbers is run, on a copy. One call is looked at: give arguments
    such as the model will get. Weights stay that several names or tensors share, that belong to
    modules with hooks or to parametrizations, and all of them if a graph fell back.
    ``model.state_dict()`` has the low ones; ``load_state_dict`` rounds float32 ones that are
    loaded into them.

    Args:
        model: A module in evaluation mode; one that was compiled is looked into.
        dtype: The low dtype of the region, or its name; by default that of the region around
            the call of ``store_low``, else what the policy says, else that which
            ``amp_fx.compile`` takes.
        policy: That of the region: a ``Policy``, the name of a preset or the path of a file.
            By default that of ``amp_fx.compile`` or of the region around, else PyTorch's.

    Returns:
        A function that takes the model's arguments, stores the weights and gives a
        ``StorageReport``.

    Raises:
        ArgumentTypeError: The model is no module.
        UnsupportedError: It is in training mode, or a parameter has a gradient.
        OptionError: The dtype is none to autocast to.
        PolicyError: The policy is none of these.
        UnsupportedError: When called: the model cannot be traced with these arguments. Nothing has
            been changed then.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"amp_fx.store_low takes a torch.nn.Module, not {model!r}")
    target, settings = unwrap(model, "amp_fx.store_low")
    assert isinstance(target, nn.Module)
    given = settings.dtype if dtype is None else as_dtype(dtype)
    found = as_policy(policy)
    if found == preset("torch"):
        found = settings.policy or ambient_policy() or found
    _refuse_training(target)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def store_call(*args: Any, **kwargs: Any) -> StorageReport:
        _refuse_training(target)
        with working(f"storing the weights of {type(target).__name__}"):
            return _store(target, given, found, args, kwargs)

    return store_call


def _refuse_training(model: nn.Module) -> None:
    names = [name for name, module in model.named_modules() if module.training]
    if names:
        where = f"its module {names[0]!r}" if names[0] else "it"
        raise UnsupportedError(
            f"{type(model).__name__} cannot be stored in low precision: {where} is in training "
            "mode, and updates are too small for low-precision weights. Call model.eval() first"
        )
    graded = [name for name, p in model.named_parameters() if p.grad is not None]
    if graded:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be stored in low precision: {graded[0]} has a "
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
    own = None if policy == preset("torch") else policy
    with no_autocast():
        region = functools.partial(autocast, device_type, dtype, policy=own)
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
        log.warning("no weight of %s was stored low: %s", report.model, _most_told(weights))
    return report


def _device_type(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the tensors' device type; those on ``meta`` are meant for a device that is here."""
    tensors = [*module_tensors(model), *leaf_tensors((args, kwargs))]
    found = target_device({tensor.device.type for tensor in tensors})
    return found if found == "cpu" or is_usable(found) else "cpu"


def _low_dtype(device_type: str, policy: Policy) -> torch.dtype:
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return policy.low_dtype(device_type) or default_dtype(device_type, warns=True)


def _replace(
    model: nn.Module, reasons: Mapping[str, str], dtype: torch.dtype
) -> tuple[StoredWeight, ...]:
    """Stores what has no reason to stay, one weight after the other; the records of all."""
    records: dict[int, StoredWeight] = {}
    for name, tensor in named_weights(model).items():
        if id(tensor) in records:
            continue
        before = tensor.dtype, tensor.numel() * tensor.element_size()
        if not reasons[name]:
            forget(tensor)
            store(tensor, dtype)
            owner, _, own_name = name.rpartition(".")
            mark_stored(model.get_submodule(owner), own_name)
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


def _most_told(weights: tuple[StoredWeight, ...]) -> str:
    """The reason of the most bytes."""
    if not weights:
        return "it has none"
    return max(weights, key=lambda weight: weight.bytes_before).reason
