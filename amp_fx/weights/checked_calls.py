"""Wrappers of compiled code that check that it neither writes to cached values nor returns them.

With ``AMP_FX_CHECK=1`` only. See Note [Cached values are read-only] in ``weights.pack``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import StaleWeightError
from amp_fx.torch_private.tensors import data_address
from amp_fx.weights.read_only import ADVICE, check_values
from amp_fx.weights.store import STORE

if TYPE_CHECKING:
    from collections.abc import Collection

    from amp_fx.weights.call import CachedCall


def checked_results(call: CachedCall, returned: Collection[int]) -> Any:
    """Returns a compiled forward that checks that its results are not cached values or weights.

    Args:
        call: The compiled forward.
        returned: Positions of the results that must not share memory with them.
    """

    def run(boxed_args: list[Any]) -> Any:
        args = tuple(boxed_args)
        results = call(boxed_args)
        owners = {}
        for entry in list(STORE.entries.values()):
            values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
            name = f"the cached value of {', '.join(entry.spec.names)}"
            owners.update({_memory(value): name for value in values})
        for spec in call.specs:
            positions = zip(spec.positions, spec.names, strict=True)
            owners.update({_memory(args[position]): name for position, name in positions})
        for position in returned:
            memory = _memory(results[position])
            if memory is not None and memory in owners:
                raise StaleWeightError(
                    f"the compiled code of {call.owner} returned memory of {owners[memory]} as "
                    f"result {position}: {ADVICE}"
                )
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _memory(value: Any) -> int | None:
    """Returns the address of a tensor's storage; None for anything else."""
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or not value.numel()
    ):
        return None
    # The storage's own ``data_ptr`` would count as a write to a weight.
    return int(data_address(value) - value.storage_offset() * value.element_size())


def checked_backward(compiled: Any, owner: str) -> Any:
    """Returns a compiled backward that checks cached values after each run."""

    def run(boxed_args: list[Any]) -> Any:
        check_values("code that ran since the latest call")
        result = compiled(boxed_args)
        check_values(f"the compiled backward of {owner}")
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
