"""Private functions of torch that the shadow run relies on, one each; tested by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage: equal for tensors that share one."""
    return cast("int", tensor.untyped_storage()._cdata)


class StorageReference:
    """A weak reference to a storage; as long as it is held no other one has its address.

    Relies on ``StorageWeakRef``, and on what is weakly referred to keeping its place in memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_dead(self) -> bool:
        """Whether nobody else holds the storage."""
        return bool(self._reference.expired())


def latest_node_number() -> int:
    """The number of the node of autograd that was made last in this thread.

    While an op runs below autograd, that is its own, if a gradient is recorded. Relies on
    ``torch.autograd._get_sequence_nr``, as AOTAutograd does.
    """
    return torch._C._autograd._get_sequence_nr() - 1


def number_of(node: Any) -> int:
    """The number of a node of autograd."""
    return cast("int", node._sequence_nr())


def is_custom(node: Any) -> bool:
    """Whether a node of autograd is that of a custom function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def running_node() -> Any:
    """The node whose backward is running in this thread; None if none is."""
    return torch._C._current_autograd_node()


def unseen_writes(tensors: list[torch.Tensor]) -> AbstractContextManager[None]:
    """Lets autograd not know of writes to tensors that are taken back, as in a running backward.

    Relies on ``torch.autograd._unsafe_preserve_version_counter``.
    """
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    context: AbstractContextManager[None] = _unsafe_preserve_version_counter(tuple(tensors))
    return context


def compiled_with(step: Any) -> tuple[dict[str, Any], bool | None]:
    """The options and ``dynamic`` that amp_fx compiled a program with; none if it did not.

    Relies on compiled modules and the closures of compiled functions holding a context, and on
    ``_torchdynamo_orig_backend`` leading from its ``callback`` to what ``torch.compile`` was given.
    """
    compiled = step
    while (contexts := _contexts(compiled)) == [] and hasattr(compiled, "__wrapped__"):
        compiled = compiled.__wrapped__
    for context in contexts:
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if getattr(backend, "compiler_name", None) == "amp_fx":
            given = {name: value for name, value in backend.kwargs.items() if value is not None}
            return {**given.pop("options", {}), **given}, backend.dynamic
    return {}, None


def _contexts(compiled: Any) -> list[Any]:
    cells = getattr(compiled, "__closure__", None) or ()
    known = [vars(compiled).get("dynamo_ctx")] if isinstance(compiled, torch.nn.Module) else []
    known += [cell.cell_contents for cell in cells]
    return [each for each in known if hasattr(each, "callback")]
