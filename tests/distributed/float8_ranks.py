"""Program of each of the two ranks of the tests of float8 policies."""

from __future__ import annotations

from tests.distributed.float8_cases import float8_fsdp2
from tests.distributed.spawn import run_cases

if __name__ == "__main__":
    run_cases((float8_fsdp2,))
