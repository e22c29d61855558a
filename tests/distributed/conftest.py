"""One spawn of two ranks for all tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both ranks, by the name of the case."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("tests.distributed.two_ranks", folder, 2)
