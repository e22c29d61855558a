"""Process groups of collectives in graphs of AOTAutograd."""

from __future__ import annotations

from typing import Any

import torch


def group_of(name: Any) -> Any:
    """Returns the process group of a collective; None if this process does not know it.

    Relies on ``torch.distributed.distributed_c10d._resolve_process_group``.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if isinstance(name, torch.distributed.ProcessGroup):
        return name
    registry: Any = torch.distributed.distributed_c10d
    try:
        return registry._resolve_process_group(name)
    except Exception:  # noqa: BLE001 - the registry may raise anything
        return None
