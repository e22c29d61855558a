"""The benchmark measures what it says, for every contender; no test looks at how fast any is."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils import benchmark

from amp_fx import weight_cache
from benchmarks import comparison as comparing
from benchmarks import contenders as ways
from benchmarks import timing
from benchmarks.__main__ import main
from benchmarks.comparison import Comparison, compare
from benchmarks.contenders import (
    AMP_FX,
    BY_NAME,
    CONTENDERS,
    FLOAT32,
    LIMIT,
    NATIVE,
    NATIVE_FROZEN,
    OPENVINO,
    ZENTORCH,
    Settings,
    Workload,
    contenders_of,
    prepare,
)
from benchmarks.timing import time_in_turns
from benchmarks.workloads import CASES, Model
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TINY = Settings(compiler="eager", repeats=2)
CACHING = dataclasses.replace(TINY, compiler="aot_eager")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one call."""
    monkeypatch.setattr(timing, "BLOCK_SECONDS", 0.0)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


BUILD = functools.partial(Model, layers)
INFERENCE = Workload("inference", BUILD, (torch.randn(2, 64),))
TRAINING = Workload("training", BUILD, (torch.randn(2, 64), torch.zeros(2).long()), 2)


def seconds(**times: list[float]) -> Comparison:
    task = benchmark.TaskSpec("", "")
    return Comparison("w", {n: benchmark.Measurement(1, t, task) for n, t in times.items()})


def test_a_run_prints_and_writes_every_contender(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "mlp", lambda: iter([INFERENCE, TRAINING]))
    path = tmp_path / "result.json"
    arguments = ["mlp", "--compiler", "eager", "--repeats", "3", "--json", str(path)]
    assert main(arguments) == 0
    result, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert result["command"] in printed
    assert [c["workload"] for c in result["comparisons"]] == ["inference", "training"]
    for comparison, kind in zip(result["comparisons"], ("inference", "training"), strict=True):
        # without inductor, contenders for inference alone have no place
        names = [c.name for c in CONTENDERS if c.only is None or c.only == kind == "training"]
        assert list(comparison["seconds"]) == names
        assert comparison["failures"] == {}
        assert all(len(times) == 3 for times in comparison["seconds"].values())
        assert list(comparison["errors"]) == (names if kind == "inference" else [])
        assert all(f"\n      {name} " in printed for name in names)


def test_ratios_are_those_of_the_rounds() -> None:
    comparison = seconds(native=[1.0, 10.0, 20.0], amp_fx=[2.0, 5.0, 80.0])
    assert comparison.ratio(AMP_FX, NATIVE) == [2.0, 1.25, 3.0]
    assert "time / native's: amp_fx 2.00 (1.25 to 3.00)" in str(comparison)
    assert "native-freezing" not in str(comparison)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_those_beside_eager_float32(dtype: torch.dtype) -> None:
    settings = dataclasses.replace(TINY, dtype=dtype, contenders=(FLOAT32, "autocast", LIMIT))
    errors = compare(INFERENCE, settings).errors
    torch.manual_seed(ways.SEED)
    model = layers().eval()
    with torch.no_grad():
        exact = model(INFERENCE.inputs[0])
        with torch.autocast("cpu", dtype):
            low = model(INFERENCE.inputs[0])
    assert errors["autocast"] == pytest.approx(float((low - exact).norm() / exact.norm()))
    assert errors[FLOAT32] == 0 < errors[LIMIT] < 0.02
    assert f"autocast         error {errors['autocast']:.1e}" in str(compare(INFERENCE, settings))


def test_a_contender_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(contender: Any, workload: Workload, settings: Settings) -> Any:
        if contender.name == AMP_FX:
            raise RuntimeError("out of luck\nand more")
        return prepare(contender, workload, settings)

    monkeypatch.setattr(comparing, "prepare", fail)
    monkeypatch.setitem(CASES, "mlp", lambda: iter([INFERENCE]))
    assert main(["mlp", "--compiler", "eager", "--contenders", "float32,amp_fx"]) == 1
    printed = capsys.readouterr().out
    assert "amp_fx failed: RuntimeError: out of luck\n" in printed
    assert "float32 " in printed


def test_compilation_while_timing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_once(*_: object, **__: object) -> dict[str, Any]:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        return {}

    monkeypatch.setattr(comparing, "time_in_turns", compile_once)
    comparison = compare(INFERENCE, dataclasses.replace(TINY, contenders=(NATIVE,)))
    assert comparison.failures == {"timing": "1 graphs were compiled meanwhile"}


def remembering(workload: Workload) -> tuple[Workload, list[nn.Module]]:
    """Returns a workload, and the models that it builds."""
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(BUILD())
        return models[-1]

    return dataclasses.replace(workload, build=build), models


def test_contenders_share_no_code_and_no_weights() -> None:
    contenders = contenders_of(TRAINING, TINY)
    workload, models = remembering(TRAINING)
    for contender in contenders:
        prepare(contender, workload, TINY)()
    assert len({p.data_ptr() for model in models for p in model.parameters()}) == 4 * len(models)
    assert len({type(model).forward.__code__ for model in models}) == len(contenders)


@pytest.mark.parametrize(
    ("name", "workload", "caches"),
    [
        ("amp_fx-uncached", INFERENCE, False),
        ("amp_fx-uncached", TRAINING, False),
        (AMP_FX, TRAINING, False),
        pytest.param(AMP_FX, INFERENCE, True, marks=needs.HOOK),
        pytest.param("amp_fx-cached", TRAINING, True, marks=needs.HOOK),
    ],
)
def test_contenders_cache_what_they_say(name: str, workload: Workload, caches: bool) -> None:
    weight_cache.clear()
    step = prepare(BY_NAME[name], workload, CACHING)
    step()
    step()
    assert bool(weight_cache.stats().entries) == caches


@needs.CPP_COMPILER
def test_inductor_freezes() -> None:
    """A frozen model does not see a write to its weights; others do."""
    workload, models = remembering(INFERENCE)
    for name in (NATIVE_FROZEN, NATIVE):
        run: Callable[[], Any] = prepare(BY_NAME[name], workload, Settings())
        with ways.compiling(BY_NAME[name]):
            before = run().clone()
        with torch.no_grad():
            models[-1].get_parameter("model.0.weight").mul_(2)
        assert torch.equal(run(), before) == (name == NATIVE_FROZEN)


IN_TORCH = dataclasses.replace(BY_NAME[FLOAT32], name="other", package="torch")
"""Eager float32 in another process."""


@pytest.mark.slow
def test_another_process_computes_the_same_and_times_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = dataclasses.replace(BY_NAME[ZENTORCH], package="no_such_package")
    monkeypatch.setitem(BY_NAME, ZENTORCH, missing)
    monkeypatch.setitem(BY_NAME, "other", IN_TORCH)
    linear = functools.partial(Model, functools.partial(nn.Linear, 64, 64))
    settings = Settings(repeats=2, contenders=(FLOAT32, ZENTORCH, "other"))
    comparison = compare(dataclasses.replace(INFERENCE, build=linear), settings)
    assert comparison.errors == {FLOAT32: 0.0, "other": 0.0}
    assert statistics.median(comparison.timings["other"].times) > 0
    assert comparison.failures.keys() == {ZENTORCH}
    assert "no_such_package" in comparison.failures[ZENTORCH]


def test_packages_that_are_not_installed_take_part_only_if_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    named = Settings(contenders=(OPENVINO, NATIVE))
    names = [contender.name for contender in contenders_of(INFERENCE, Settings())]
    assert {OPENVINO, ZENTORCH}.isdisjoint(names)
    assert NATIVE_FROZEN in names
    assert [c.name for c in contenders_of(INFERENCE, named)] == [NATIVE, OPENVINO]
    assert [c.name for c in contenders_of(TRAINING, named)] == [NATIVE]


def test_turns_are_fair_on_a_machine_that_becomes_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a hundredth longer than the one before."""
    calls: list[str] = []
    now = 0.0

    def work(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds * 1.01 ** len(calls)
        calls.append(name)

    monkeypatch.setattr(benchmark, "timer", lambda: now)
    costs = {"a": 1.0, "twin of a": 1.0, "b": 2.0}
    runs = {name: functools.partial(work, name, seconds) for name, seconds in costs.items()}
    timings = time_in_turns(runs, repeats=40)
    turns = [tuple(calls[-start : -start + 3 or None]) for start in range(3, 123, 3)]
    assert all(sorted(turn) == sorted(costs) for turn in turns)
    assert len(set(turns)) > 1
    assert timings["a"].times[-1] > 2 * timings["a"].times[0]
    comparison = Comparison("w", timings)
    assert comparison.ratio("a", "twin of a")[0] == pytest.approx(1, abs=0.02)
    assert comparison.ratio("b", "a")[0] == pytest.approx(2, abs=0.04)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "expected one of mlp, "),
        (["--device", "nowhere"], "--device"),
        (["--dtype", "float64"], "--dtype"),
        (["--contenders", "native,mine"], "mine: expected one of float32, "),
        (["--compiler", "gcc"], "aot_eager"),
        (["--repeats", "many"], "--repeats"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_case_runs_with_amp_fx(case: str) -> None:
    pytest.importorskip("transformers")
    settings = dataclasses.replace(CACHING, contenders=(AMP_FX,), repeats=1)
    for workload in CASES[case]():
        comparison = compare(workload, settings)
        assert comparison.failures == {}
        assert workload.micro_batches or comparison.errors[AMP_FX] < 0.03
