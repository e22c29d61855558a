"""Makes the CPU write lists of tensors as CUDA does: where copy-on-write cannot see it.

CUDA's fused optimizers and in-place ``_foreach_*_`` kernels take ``const_data_ptr()`` of the
tensors that they write, so that a storage that is copy-on-write stays so. The CPU's ask for
mutable pointers. Under ``cuda_like()`` they still run, bit for bit, but on aliases: storages
of their own over the same bytes, so that the written storages and versions are left alone.
What sits above the CPU key (autograd, hooks, kernels of others) is called as ever.

Two differences are left, both on the strict side: CUDA's foreach kernels raise the versions of
the very tensors that they are given (not of the parameter behind a ``.data``), and the fallback
for lists that no fast kernel takes writes through mutable pointers.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIST_WRITES = re.compile(r"aten::(_foreach_\w+_|_fused_(adam|adamw|sgd|adagrad)_)(\.\w+)?$")


def list_writes() -> list[str]:
    """Returns the names of all ops, with overloads, that write to lists of tensors."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(filter(LIST_WRITES.match, names))


@contextlib.contextmanager
def cuda_like() -> Iterator[None]:
    """Replaces the CPU kernels of ``list_writes`` for the time of the context."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that a kernel is replaced
        for name in list_writes():
            kernel = _on_aliases(torch.library.get_kernel(name, "CPU"))
            library.impl(name.removeprefix("aten::"), kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _on_aliases(original: Any) -> Callable[..., None]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _pytree.tree_map_only(torch.Tensor, alias, (args, kwargs))
        original.call_boxed(keys, *args, **kwargs)

    return kernel


def write_list(name: str, tensors: list[torch.Tensor]) -> None:
    """Calls an op of ``list_writes`` on tensors, with positive numbers as its other arguments."""
    base, _, overload = name.partition(".")
    positional, named = [], {}
    for i, argument in enumerate(torch._C._get_schema(base, overload).arguments):
        if i == 0:
            positional.append(tensors)
        elif argument.kwarg_only and not argument.has_default_value():
            named[argument.name] = _value_for(argument, i, tensors)
        elif not argument.has_default_value():
            positional.append(_value_for(argument, i, tensors))
    op = getattr(torch.ops.aten, base.removeprefix("aten::"))
    getattr(op, overload or "default")(*positional, **named)


def _value_for(argument: Any, seed: int, tensors: list[torch.Tensor]) -> Any:
    generator = torch.Generator().manual_seed(seed)
    kind = str(argument.type)
    if argument.name == "state_steps":
        return [torch.ones(()) for _ in tensors]
    if argument.name == "max_exp_avg_sqs":  # the op insists, without amsgrad
        return []
    if argument.name == "scalars" and kind == "Tensor":
        return torch.rand(len(tensors), generator=generator) + 0.1
    if kind == "List[Tensor]":
        return [torch.rand(t.shape, generator=generator).to(t.device) + 0.1 for t in tensors]
    values = {"List[number]": [0.5] * len(tensors), "Tensor": torch.tensor(0.5), "bool": False}
    return values.get(kind, 0.5)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same bytes and an unwatched storage; must not outlive the tensor.

    Relies on ``torch._C._data_address``, which requests no mutable pointer. A Python object of the
    storage would look like a reader of the tensor, so none is created.
    """
    if tensor.numel() == 0 or tensor.device.type != "cpu":
        return tensor
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    num_bytes = int(tensor.storage_offset() + reach + 1) * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(address, tensor.device, num_bytes)
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
