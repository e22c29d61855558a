"""All cases of model parity: what each family registers when it is imported."""

from __future__ import annotations

from tests.parity.cases import CASES
from tests.parity.models import (  # noqa: F401, each registers its cases
    graph_breaks,
    losses,
    mutation,
    opaque,
    recurrent,
    regions,
    shapes,
    transformers,
    weights,
)

__all__ = ["CASES"]
