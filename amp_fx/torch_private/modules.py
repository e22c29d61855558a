"""Hooks of ``nn.Module``, and modules that FSDP2 shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import types


def has_global_module_hooks() -> bool:
    """Returns True if hooks are registered for all modules."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def code_of_module_calls() -> types.CodeType:
    """Returns the code object that runs the hooks and ``forward`` of a module."""
    return torch.nn.Module._call_impl.__code__


def states_of_sharded_modules() -> list[Any]:
    """Returns weak references to the states of modules that ``fully_shard`` sharded."""
    from torch.distributed._composable_state import _module_state_mapping

    return list(_module_state_mapping.values())


def module_id(key: str) -> int:
    """Returns the ``id`` of a module from its key in ``node.meta["nn_module_stack"]``.

    Dynamo writes ``str(id(module))``, followed by ``@`` and a number for repeated calls.

    Returns:
        The ``id``; 0 in exported graphs, whose keys are names.
    """
    number = key.partition("@")[0]
    return int(number) if number.isdecimal() else 0
