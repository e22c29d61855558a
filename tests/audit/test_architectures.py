"""Sound training steps of models of ``transformers``: what the audit finds in them is true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx

pytest.importorskip("transformers")

from tests.audit.architectures import MODELS, build

if TYPE_CHECKING:
    from amp_fx.numerics.audit.report import AuditReport

pytestmark = pytest.mark.filterwarnings("ignore")

EXPECTED = {
    # The router's product runs in bfloat16.
    "mixtral": {("router_low", "router_top_value, router_indices = torch.topk(")},
    # All layers share their weights.
    "albert": {
        ("gradient_sum_low", f"{name}(")
        for name in ("self.query", "self.key", "self.value", "self.dense", "self.ffn")
    }
    | {("gradient_sum_low", "self.ffn_output(")},
}
"""Kinds and lines of the findings."""


def audited(name: str, dtype: torch.dtype, scaler: Any = None) -> AuditReport:
    torch.manual_seed(0)
    model, inputs = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(**given: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return model(**given).loss

    return amp_fx.audit(step, optimizer, scaler)(**inputs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_only_what_is_true_is_found(name: str) -> None:
    report = audited(name, torch.bfloat16)
    expected = EXPECTED.get(name, set())
    unknown = [
        finding
        for finding in report.findings
        if not any(finding.kind == kind and line in finding.code for kind, line in expected)
    ]
    assert not unknown, str(report)
    assert len(report.findings) >= len(expected)
    whats = {use.what for use in report.uses if use.dtype == "bfloat16"}
    assert {"saved activations", "products"} <= whats
    assert not {"parameters", "gradients", "optimizer states"} & whats


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_float16_with_a_scaler_is_sound(name: str) -> None:
    assert not audited(name, torch.float16, torch.amp.GradScaler("cpu")).findings
    [finding] = audited(name, torch.float16).findings
    assert finding.kind == "scaler_missing"
