"""``amp_fx.audit`` finds each planted fault at its line, and nothing in the sound twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx.numerics.audit.report import REPAIRS
from tests.audit.programs import PLANTED, SOUND

pytestmark = pytest.mark.filterwarnings("ignore:.*Disabling autocast")


def audited(program: Any) -> Any:
    torch.manual_seed(0)
    step, inputs, options = program()
    return amp_fx.audit(step, **options)(*inputs)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_at_its_line(name: str) -> None:
    kind, program = PLANTED[name]
    report = audited(program)
    found = [finding for finding in report.findings if finding.kind == kind]
    assert [finding.code.endswith("# here") for finding in found] == [True], str(report)
    [finding] = found
    assert finding.source.partition(":")[0].endswith("tests/audit/programs.py")
    assert finding.message
    assert finding.repair == REPAIRS[kind]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_twin_has_no_such_finding(name: str) -> None:
    kind, program = SOUND[name]
    report = audited(program)
    found = [finding for finding in report.findings if kind in ("all", finding.kind)]
    assert not found, str(report)


def test_the_repair_of_low_states_depends_on_the_weights() -> None:
    _, float32_weights = PLANTED["state_that_the_first_step_creates"]
    _, low_weights = PLANTED["low_weights_with_a_small_rate"]
    repairs = [
        [f.repair for f in audited(program).findings if f.kind == "state_low"]
        for program in (float32_weights, low_weights)
    ]
    assert [len(each) for each in repairs] == [1, 1]
    assert "for float32 weights" not in repairs[0][0]
    assert "Create the optimizer for float32 weights" in repairs[1][0]


@pytest.mark.parametrize(("eps", "fused"), [(1e-8, False), (1e-4, False), (1e-8, True)])
def test_an_eps_that_is_zero_in_float16(eps: float, fused: bool) -> None:
    model = torch.nn.Embedding(8, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), eps=eps, fused=fused)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(ids).float().square().sum().backward()
        optimizer.step()

    ids = torch.arange(4)
    report = amp_fx.audit(step)(ids)
    [finding] = [each for each in report.findings if each.kind == "state_low"]
    step(ids)
    becomes_nan = bool(model.weight.isnan().any())
    assert ("divides by zero" in finding.message) is becomes_nan is (eps == 1e-8 and not fused)


def test_each_kind_has_a_planted_fault() -> None:
    kinds = {kind for kind, _ in PLANTED.values()}
    assert kinds == set(REPAIRS) - {"reduction_low"}  # in test_collectives.py
    assert kinds <= {kind for kind, _ in SOUND.values()}


def test_a_region_around_the_audit_is_that_of_the_forward() -> None:
    model = torch.nn.Linear(16, 16)
    with torch.autocast("cpu"):
        report = amp_fx.audit(lambda x: model(x).float().square().mean())(torch.randn(4, 16))
    assert not report.findings
    assert {use.dtype for use in report.uses if use.what == "products"} == {"bfloat16"}


def test_sparse_and_complex_tensors_are_left_alone() -> None:
    table, weight = torch.nn.Embedding(32, 16, sparse=True), torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD([*table.parameters(), *weight.parameters()], lr=0.1)

    def step(ids: torch.Tensor) -> Any:
        with torch.autocast("cpu"):
            hidden = weight(table(ids)).float()
        return torch.fft.rfft(hidden).abs().mean() + (torch.eye(16).to_sparse() @ hidden).mean()

    report = amp_fx.audit(step, optimizer)(torch.randint(32, (16,)))
    assert not report.findings


def test_the_terms_of_a_low_sum_are_counted() -> None:
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def step() -> None:
        for _ in range(6):
            torch.autograd.backward((weight * 1.3).sum().float())

    [finding] = [f for f in amp_fx.audit(step)().findings if f.kind == "gradient_sum_low"]
    assert "6 micro-batches" in finding.message
    assert "off by up to 0.39%" in finding.message


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(257, torch.bfloat16), (258, torch.bfloat16), (2049, torch.float16), (2050, torch.float16)],
)
def test_positions_are_a_finding_if_the_dtype_rounds_one(length: int, dtype: torch.dtype) -> None:
    positions, weight = torch.arange(length).float(), torch.randn(1, 4, requires_grad=True)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return (positions[:, None] @ weight).float().square().mean()

    is_rounded = bool((positions.to(dtype).float() != positions).any())
    kinds = {finding.kind for finding in amp_fx.audit(step)().findings}
    assert ("integer_low" in kinds) is is_rounded


def test_what_a_checkpoint_computes_again_is_counted_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))

    def products(*, is_checkpointed: bool) -> int:
        def step(x: torch.Tensor) -> Any:
            with torch.autocast("cpu"):
                hidden = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            return hidden.float().square().mean()

        report = amp_fx.audit(step)(torch.randn(4, 16))
        return sum(use.count for use in report.uses if use.what == "products")

    assert products(is_checkpointed=True) == products(is_checkpointed=False)


def test_each_micro_batch_saves_its_own_activations() -> None:
    """Memory of one is reused by the next, which counts as well."""
    weight = torch.nn.Parameter(torch.randn(16, 16))

    def saved(parts: int) -> int:
        def step(x: torch.Tensor) -> None:
            for _ in range(parts):
                torch.autograd.backward((x @ weight).sigmoid().square().sum())

        uses = amp_fx.audit(step)(torch.randn(4, 16)).uses
        return sum(use.count for use in uses if use.what == "saved activations")

    assert saved(64) == 64 * saved(1) > 0
