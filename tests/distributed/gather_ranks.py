"""Program of each of two ranks, which gather their weights inside their graphs."""

from __future__ import annotations

from tests.distributed import fsdp_cases
from tests.distributed.spawn import run_cases

if __name__ == "__main__":
    run_cases((fsdp_cases.gathered_in_graph,))
