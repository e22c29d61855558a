"""Hooks of ``nn.Module``, and modules that FSDP2 shards."""

from __future__ import annotations

from typing import Any

import torch


def has_global_module_hooks() -> bool:
    """Returns True if hooks are registered for all modules."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def states_of_sharded_modules() -> list[Any]:
    """Returns weak references to the states that ``fully_shard`` gave to modules."""
    from torch.distributed._composable_state import _module_state_mapping

    return list(_module_state_mapping.values())
