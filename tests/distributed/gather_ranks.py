"""What each of two processes does that gathers its weights inside of its graphs."""

from __future__ import annotations

from tests.distributed import fsdp_cases
from tests.distributed.spawn import run_cases

if __name__ == "__main__":
    run_cases((fsdp_cases.gathered_in_graph,))
