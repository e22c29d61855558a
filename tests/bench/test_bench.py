"""The benchmark measures what it says, for every contender; no test looks at how fast any is."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import random
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from amp_fx import csrc, weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.bench import compare as comparing
from amp_fx.bench import compile_worker
from amp_fx.bench import report as reports
from amp_fx.bench.__main__ import main
from amp_fx.bench.cases import CASES, compile_time, inference, models, overhead
from amp_fx.bench.compare import Comparison, Figure, Measured, MemoryMeter, compare
from amp_fx.bench.contenders import (
    AMP_FX,
    BY_NAME,
    CACHED,
    CONTENDERS,
    LIMIT,
    NAMES,
    NATIVE,
    OPENVINO,
    UNCACHED,
    ZENTORCH,
    Workload,
    contenders_of,
    prepare,
)
from amp_fx.bench.settings import Settings
from amp_fx.bench.timing import THREADS, measurement, time_in_turns
from amp_fx.demo.models import MLP
from tests import needs
from tests.bench import lean
from tests.bench.lean import POLICIES

if TYPE_CHECKING:
    from pathlib import Path

    from torch.utils.benchmark import Measurement

    from amp_fx.bench.contenders import Run

CPU = torch.device("cpu")
QUICK = ("--tiny", "--compiler", "eager", "--repeats", "3", "--steps", "1")
TINY = Settings(compiler="eager", repeats=2, steps=1, tiny=True)
CACHING = dataclasses.replace(TINY, compiler="aot_eager")
# Contenders for inference alone need inductor or another package.
TRAINED = [contender for contender in CONTENDERS if not contender.is_for_inference]
WITHOUT_INDUCTOR = [contender.name for contender in TRAINED]
MODELS = ("mlp", "mlp-train", "gpt-decode", "vit")
SLOW_MODELS = ("gpt-train", "conv", "lstm-cell")


def ignore(*_: object) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a piped run of a case, inference and training, prints, and its JSON."""
    torch._dynamo.reset()
    path = tmp_path_factory.mktemp("bench") / "result.json"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", printed)
        assert main(["lstm-cell", *QUICK, "--json", str(path)]) == 0
    return printed.getvalue(), json.loads(path.read_text())


def test_json_has_every_contender(run: tuple[str, dict[str, Any]]) -> None:
    _, result = run
    assert [c["case"] for c in result["comparisons"]] == ["lstm-cell"] * 2
    for comparison in result["comparisons"]:
        trains = not comparison["workload"].startswith("inference")
        expected = [n for n in WITHOUT_INDUCTOR if trains or not BY_NAME[n].is_for_training]
        assert [c["name"] for c in comparison["contenders"]] == expected
        assert comparison["failures"] == {}
        for contender in comparison["contenders"]:
            assert len(contender["seconds"]) == 3
            assert all(seconds > 0 for seconds in contender["seconds"])
            assert min(contender["seconds"]) <= contender["median"] <= max(contender["seconds"])
            assert contender["peak_bytes"] > 0
    assert result["settings"]["dtype"] == "bfloat16"
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["cores"] >= 1


def test_ratios_are_those_of_the_medians(run: tuple[str, dict[str, Any]]) -> None:
    _, result = run
    for comparison in result["comparisons"]:
        medians = {c["name"]: c["median"] for c in comparison["contenders"]}
        for c in comparison["contenders"]:
            speedup, to_limit = c["speedup_over_native"], c["time_to_limit"]
            assert speedup == pytest.approx(medians["native"] / c["median"])
            limit = medians.get("limit-freezing", medians["limit"])
            assert to_limit == pytest.approx(c["median"] / limit)


def test_speedups_with_and_without_the_cache_are_those_of_the_rounds(
    run: tuple[str, dict[str, Any]],
) -> None:
    printed, result = run
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    for comparison in result["comparisons"]:
        seconds = {c["name"]: c["seconds"] for c in comparison["contenders"]}
        for name in (AMP_FX, UNCACHED):
            what = f"native / {name}, round by round"
            ratios = [a / b for a, b in zip(seconds[NATIVE], seconds[name], strict=True)]
            assert figures[f"{comparison['workload']}: {what}"] == statistics.median(ratios)
            assert printed.count(what) == len(result["comparisons"])


def test_a_paired_ratio_compares_samples_of_the_same_round() -> None:
    native, ours = measurement(NATIVE, [2.0, 20.0, 60.0]), measurement(AMP_FX, [1.0, 10.0, 5.0])
    comparison = Comparison("w", (Measured(NATIVE, native), Measured(AMP_FX, ours)))
    assert comparison.paired_ratio(NATIVE, AMP_FX) == 2.0
    assert comparison.ratio(NATIVE, AMP_FX) == 4.0
    assert comparison.paired_ratio(NATIVE, UNCACHED) is None


@pytest.mark.parametrize("num_rounds", [6, 7, 12, 20, 61])
def test_the_interval_of_a_paired_ratio_holds_the_median_as_often_as_it_says(
    num_rounds: int,
) -> None:
    """Of rounds drawn from a skewed spread whose median is 1."""
    rng = random.Random(num_rounds)
    held = 0
    for _ in range(1000):
        ours = measurement(AMP_FX, [rng.lognormvariate(0.0, 0.3) for _ in range(num_rounds)])
        native = measurement(NATIVE, [1.0] * num_rounds)
        comparison = Comparison("w", (Measured(AMP_FX, ours), Measured(NATIVE, native)))
        interval = comparison.paired_interval(AMP_FX, NATIVE)
        assert interval is not None
        held += interval[0] <= 1 <= interval[1]
    assert 930 <= held <= 995


def test_a_few_rounds_give_no_interval() -> None:
    timing = measurement("w", [1.0] * 5)
    comparison = Comparison("w", (Measured(AMP_FX, timing), Measured(NATIVE, timing)))
    assert comparison.paired_interval(AMP_FX, NATIVE) is None
    assert comparison.paired_interval(AMP_FX, UNCACHED) is None


def test_each_compiled_contender_compiles_once_and_before_the_timing(
    run: tuple[str, dict[str, Any]],
) -> None:
    _, result = run
    is_compiled = {contender.name: contender.is_compiled for contender in CONTENDERS}
    for comparison in result["comparisons"]:
        assert comparison["recompiled_graphs"] == 0
        for contender in comparison["contenders"]:
            assert contender["graphs"] == is_compiled[contender["name"]]


def test_tables_have_every_contender_and_no_progress(run: tuple[str, dict[str, Any]]) -> None:
    printed, result = run
    rows = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    names = [c["name"] for comparison in result["comparisons"] for c in comparison["contenders"]]
    assert [row[1].strip() for row in rows] == names
    assert "timing" not in printed
    assert "\x1b" not in printed
    assert result["machine"]["processor"] in printed
    assert result["command"] in printed


def test_casts_have_a_share_of_each_training_step() -> None:
    settings = dataclasses.replace(TINY, contenders=(NATIVE,))
    figures = [o for o in CASES["mlp-train"].run(settings, ignore) if isinstance(o, Figure)]
    shares = [figure.value for figure in figures if figure.unit == "%"]
    assert len(shares) == 5  # one of the step with one micro-batch, two of those with more
    assert shares[2] == pytest.approx(4 * shares[1])
    assert shares[4] == pytest.approx(16 * shares[3])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case", [*MODELS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_MODELS)]
)
def test_every_model_runs_with_amp_fx(case: str) -> None:
    settings = Settings(compiler="eager", contenders=("amp_fx",), repeats=1, steps=1, tiny=True)
    for outcome in CASES[case].run(settings, ignore):
        if isinstance(outcome, Comparison):
            assert outcome.failures == {}
            [measured] = outcome.measured
            assert measured.num_graphs == 1


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
def test_inductor_freezes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ("--tiny", "--repeats", "1", "--contenders", "native-freezing")
    assert main(["overhead", *arguments, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    [[contender]] = [c["contenders"] for c in result["comparisons"]]
    assert (contender["name"], contender["graphs"]) == ("native-freezing", 1)
    assert contender["speedup_over_native"] is None
    [look] = result["figures"]
    assert look["value"] > 0


@pytest.mark.slow
def test_compilation_is_timed_in_processes_with_caches_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caches: list[str] = []
    done: list[subprocess.CompletedProcess[str]] = []
    run_process = subprocess.run

    def spy(*args: Any, **kwargs: Any) -> Any:
        caches.append(kwargs["env"]["TORCHINDUCTOR_CACHE_DIR"])
        if len(caches) == 1:
            done.append(run_process(*args, **kwargs))
        return done[0]  # one process will do: each takes seconds to import torch

    monkeypatch.setattr(subprocess, "run", spy)
    monkeypatch.setenv(csrc.SWITCH, "0")  # not built in the empty cache: 20 seconds
    path = tmp_path / "result.json"
    arguments = ("--repeats", "1", "--layers", "1", "--contenders", "amp_fx")
    assert main(["compile-time", *QUICK, *arguments, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [c["workload"] for c in result["comparisons"]] == ["1 layers, cold", "1 layers, warm"]
    for comparison in result["comparisons"]:
        assert [c["name"] for c in comparison["contenders"]] == ["amp_fx"]
    own = {f["name"]: f["value"] for f in result["figures"] if f["unit"] == "s"}
    assert own.keys() == {"amp_fx's own part, 1 layers", "amp_fx's own part, 4 layers"}
    assert all(seconds > 0 for seconds in own.values())
    assert caches[0] == caches[1]  # warm is what finds the cache of the cold one before it
    assert len(set(caches)) == 3


def test_scalers_take_part() -> None:
    num_threads = torch.get_num_threads()
    outcomes = list(CASES["scaler"].run(TINY, ignore))
    comparisons = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
    assert len(comparisons) == 10
    for comparison in comparisons:
        names = [measured.name for measured in comparison.measured]
        is_compiled = comparison.workload in (
            "AdamW foreach, 2 parameters",
            "SGD foreach, 2 parameters",
        )
        assert names == ["bare", "torch", "amp_fx", *["compiled step"] * is_compiled]
    figures = {o.name: o.value for o in outcomes if isinstance(o, Figure)}
    assert len(figures) == 3 * len(comparisons) + 2
    share = figures["SGD fused, 4 parameters: amp_fx adds, of what torch adds"]
    ours, theirs = (figures[f"SGD fused, 4 parameters: {who} adds"] for who in ("amp_fx", "torch"))
    assert share == pytest.approx(100 * ours / theirs)
    assert torch.get_num_threads() == num_threads


@pytest.mark.slow
def test_lean_is_compared_with_the_default_policy() -> None:
    outcomes = list(lean.run(TINY, ignore))
    comparisons = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
    for comparison in comparisons:
        assert [measured.name for measured in comparison.measured] == ["torch", "lean"]
        assert all(measured.peak_bytes for measured in comparison.measured)
    tasks = [comparison.workload for comparison in comparisons]
    assert tasks == ["norm last", "norm first", "ResNet", "U-Net"]
    figures = {o.name: o.value for o in outcomes if isinstance(o, Figure)}
    for task, (least, most) in zip(tasks, [(4, 8), (4, 8), (0.5, 4), (0.05, 2)], strict=True):
        losses = [figures[f"{task}: last loss with {name}, mean of seeds"] for name in POLICIES]
        assert all(least < loss < most for loss in losses), "bytes at random cost 5.5 nats"
        assert figures[f"{task}: lean's mean less torch's"] == pytest.approx(losses[1] - losses[0])
        spread = figures[f"{task}: ... from the least to the most"]
        assert spread > 0, "seeds are different runs"


IN_TORCH = dataclasses.replace(BY_NAME["float32"], name="other", package="torch")
"""Eager float32 in a process of its own."""

MISSING = dataclasses.replace(BY_NAME[ZENTORCH], package="no_such_package")


@pytest.mark.slow
def test_another_process_computes_the_same_and_times_itself() -> None:
    workload = Workload("w", functools.partial(MLP, 8, 2), (torch.randn(2, 8),))
    contenders = [BY_NAME["float32"], IN_TORCH, MISSING]
    comparison, _ = compare(workload, TINY, ignore, contenders)
    here, there = comparison.measured
    assert (here.error, there.error) == (0.0, 0.0)
    assert there.timing.median > 0
    assert comparison.failures.keys() == {ZENTORCH}
    assert "no_such_package" in comparison.failures[ZENTORCH]


def test_packages_that_are_not_installed_take_part_only_if_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    [workload, *_] = models.mlp(TINY)
    inductor = dataclasses.replace(TINY, compiler="inductor")
    named = dataclasses.replace(inductor, contenders=(OPENVINO, NATIVE))
    assert {OPENVINO, ZENTORCH}.isdisjoint(c.name for c in contenders_of(workload, inductor))
    assert [c.name for c in contenders_of(workload, named)] == [NATIVE, OPENVINO]


def test_errors_are_those_beside_eager_float32() -> None:
    workload = Workload("w", functools.partial(MLP, 64, 2), (torch.randn(2, 64),))
    contenders = [BY_NAME[name] for name in ("float32", "autocast", LIMIT)]
    comparison, _ = compare(workload, TINY, ignore, contenders)
    exact, *low = [measured.error for measured in comparison.measured]
    assert exact == 0
    assert all(error is not None and 1e-4 < error < 2e-2 for error in low)


def test_the_fastest_contender_is_as_exact_as_amp_fx() -> None:
    samples = {
        AMP_FX: (2.0, 0.004),
        "amp_fx-autotune": (1.0, 0.004),
        NATIVE: (4.0, 0.004),
        ZENTORCH: (3.0, 0.005),
        OPENVINO: (2.5, 0.009),
        LIMIT: (1.5, 0.004),
    }
    measured = tuple(
        Measured(name, measurement(name, [seconds]), error=error)
        for name, (seconds, error) in samples.items()
    )
    assert comparing._fastest_as_exact(Comparison("w", measured)) == ZENTORCH
    assert comparing._fastest_as_exact(Comparison("w", measured[1:])) is None


def test_times_are_compared_with_reading_the_weights() -> None:
    settings = dataclasses.replace(TINY, contenders=(AMP_FX,))
    [workload] = models.gpt_decode(settings)
    comparison, figures = compare(workload, settings, ignore)
    values = {figure.name.removeprefix(f"{workload.name}: "): figure.value for figure in figures}
    limit = values["reading as many bytes as its weights have"]
    assert values["the bandwidth of that"] == pytest.approx(workload.weight_bytes / limit / 1e6)
    share = values["amp_fx, share of that bandwidth"]
    assert 0 < share < 1
    assert [measured.name for measured in comparison.measured] == [AMP_FX]
    matrices = [p for p in workload.build().parameters() if p.dim() == 2]
    *_, position = sorted(matrices, key=lambda p: p.shape == (8, 16))
    assert workload.weight_bytes == 2 * sum(p.numel() for p in matrices if p is not position)


@pytest.mark.slow
def test_inference_has_every_model_with_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inference, "THREADS", (1,))
    settings = dataclasses.replace(TINY, contenders=(AMP_FX, LIMIT), repeats=1, layers=1)
    outcomes = list(inference.run(settings, ignore))
    comparisons = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
    expected = [f"{workload.name}, 1 thread" for workload in inference.workloads(settings)]
    assert [comparison.workload for comparison in comparisons] == expected
    for comparison in comparisons:
        [measured] = comparison.measured
        assert (measured.name, comparison.failures) == (AMP_FX, {})
        assert measured.error is not None
        assert measured.error < 0.02


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("contender", [AMP_FX, NATIVE])
def test_compilation_has_a_part_of_our_own(contender: str, is_inference: bool) -> None:
    given = {
        "layers": 1,
        "compiler": "eager",
        "device": "cpu",
        "dtype": "float16",
        "tiny": True,
        "is_inference": is_inference,
    }
    measured = compile_worker.main({"contender": contender, **given})
    assert measured["seconds"] > measured["own_seconds"]
    assert (measured["own_seconds"] > 0) == (contender == "amp_fx")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("nothing",), list(CASES)),
        (("--device", "nowhere"), ["no such device"]),
        (("--device", "meta"), ["cpu", "cuda"]),
        (("--dtype", "float64"), ["bfloat16", "float16"]),
        (("--contenders", "native,mine"), list(NAMES)),
        (("--compiler", "gcc"), ["inductor", "aot_eager", "eager"]),
        (("--repeats", "0"), ["positive integer"]),
        (("--steps", "many"), ["positive integer"]),
        (("--json", "no/such/folder/file"), ["folder"]),
    ],
)
def test_bad_arguments_give_one_line(
    arguments: tuple[str, ...], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(name in captured.err for name in names)
    assert arguments[-1].rpartition(",")[2] in captured.err


def test_plot_without_matplotlib_gives_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # import raises ImportError
    assert main(["mlp", *QUICK, "--plot", str(tmp_path / "bars.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "amp_fx[bench]" in captured.err


def test_plot_draws_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = reports.BenchReport(TINY, "", {}, {}, [("mlp", comparison_of(native=2.0, amp_fx=1.0))])
    reports.write_plot(tmp_path / "bars.svg", report)
    assert "native" in (tmp_path / "bars.svg").read_text()


def comparison_of(**medians: float) -> Comparison:
    """A comparison with one sample for each contender."""
    measured = tuple(
        Measured(name, measurement(name, [seconds])) for name, seconds in medians.items()
    )
    return Comparison("w", measured)


def test_a_contender_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(contender: Any, workload: Workload, settings: Settings) -> Any:
        if contender.name == "amp_fx":
            raise RuntimeError("out of luck\nand more")
        return prepare(contender, workload, settings)

    monkeypatch.setattr(comparing, "prepare", fail)
    assert main(["lstm-cell", *QUICK, "--contenders", "float32,amp_fx"]) == 1
    printed = capsys.readouterr().out
    assert "amp_fx failed: RuntimeError: out of luck\n" in printed
    assert "float32 " in printed


def test_a_case_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(compile_time, "_measure", fail)
    assert main(["compile-time", "lstm-cell", *QUICK, "--contenders", "float32,native"]) == 1
    printed = capsys.readouterr().out
    assert "compile-time failed: RuntimeError: out of luck\n" in printed
    assert "float32 " in printed


def test_prepared_contenders_share_no_code_and_no_weights() -> None:
    models: list[torch.nn.Module] = []

    def build() -> torch.nn.Module:
        models.append(MLP(4, 2))
        return models[-1]

    x = torch.randn(2, 4)
    runs = [prepare(contender, Workload("w", build, (x,)), TINY) for contender in TRAINED]
    for run_once in runs:
        run_once()
    pointers = {p.data_ptr() for model in models for p in model.parameters()}
    codes = {type(model).forward.__code__ for model in models}
    assert len(pointers) == 4 * len(TRAINED)
    assert len(codes) == len(TRAINED)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "is_trained", "caches"),
    [
        (UNCACHED, False, False),
        (UNCACHED, True, False),
        (AMP_FX, True, False),
        pytest.param(AMP_FX, False, True, marks=needs.HOOK),
        pytest.param(CACHED, True, True, marks=needs.HOOK),
    ],
)
def test_contenders_cache_what_they_say(*, name: str, is_trained: bool, caches: bool) -> None:
    make = models.gpt_training if is_trained else models.mlp
    weight_cache.clear()
    step = prepare(BY_NAME[name], next(make(CACHING)), CACHING)
    step()
    step()
    assert bool(weight_cache.stats().entries) == caches


def test_recompilation_while_timing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter(range(100))
    monkeypatch.setattr(comparing, "_num_graphs", lambda: next(counted))
    [workload, *_] = models.mlp(TINY)
    comparison, _ = compare(workload, TINY, ignore, [BY_NAME[NATIVE]])
    assert comparison.num_recompiled == 1
    console = Console(file=io.StringIO(), record=True)
    reports.print_outcome(console, "mlp", comparison)
    assert "the times are invalid" in console.export_text()


def test_turns_are_one_block_each_per_round() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    rounds: list[int] = []
    timings = time_in_turns(runs, repeats=5, steps=1, on_round=rounds.append)
    assert rounds == [1, 2, 3, 4, 5]
    turns = [calls[start : start + 3] for start in range(0, 15, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(map(tuple, turns))) > 1
    assert all(len(timing.times) == 5 for timing in timings.values())


class Clock:
    """A machine that becomes slower with everything that it does."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += self.slowness * seconds
        self.slowness *= 1.01


@pytest.fixture
def clock() -> Clock:
    """The clock by which blocks are timed."""
    return Clock()


def test_turns_are_fair_on_a_machine_that_becomes_slower(clock: Clock) -> None:
    costs = {"a": 1.0, "twin of a": 1.0, "b": 2.0}
    runs = {name: functools.partial(clock.work, seconds) for name, seconds in costs.items()}
    timings = time_in_turns(runs, repeats=40, steps=1, clock=clock.perf_counter)
    measured = tuple(Measured(name, timings[name]) for name in runs)
    comparison = Comparison("w", measured)
    assert measured[0].timing.times[-1] > 3 * measured[0].timing.times[0]
    for ratio in (comparison.ratio, comparison.paired_ratio):
        assert ratio("a", "twin of a") == pytest.approx(1, abs=0.02)
        assert ratio("b", "a") == pytest.approx(2, abs=0.04)


def test_what_runs_before_a_block_is_not_timed(clock: Clock) -> None:
    calls: list[str] = []
    runs = {name: functools.partial(calls.append, name) for name in ("a", "b")}

    def prepare_a() -> None:
        calls.append("before a")
        clock.work(1.0)

    timings = time_in_turns(
        runs, repeats=5, steps=1, before={"a": prepare_a}, clock=clock.perf_counter
    )
    assert timings["a"].raw_times == timings["b"].raw_times == [0.0] * 5
    assert calls.count("before a") == calls.count("a") == calls.count("b") == 5
    assert all(calls[calls.index("a", i) - 1] == "before a" for i in range(len(calls) - 3))


def test_fairness_times_native_beside_a_twin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fairness", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "native-twin" in printed
    assert "native / native-twin, round by round" in printed
    assert list(CASES["fairness"].run(Settings(contenders=(AMP_FX,), tiny=True), ignore)) == []


def test_a_refresh_is_timed_where_all_weights_are_stale_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refreshes: dict[str, list[int]] = {}

    def count(
        runs: dict[str, Run], *, repeats: int, before: dict[str, Run], **_: object
    ) -> dict[str, Measurement]:
        for name, timed in [*runs.items()] * repeats:
            before[name]()
            so_far = weight_cache.stats().refreshes
            timed()
            refreshes.setdefault(name, []).append(weight_cache.stats().refreshes - so_far)
        seconds = {overhead.STALE: 9.0, overhead.FRESH: 2.0, overhead.COPYING: 3.0}
        return {name: measurement(name, [seconds[name]]) for name in runs}

    monkeypatch.setattr(overhead, "time_in_turns", count)
    weight_cache.clear()
    build = functools.partial(MLP, 8, 2)
    figure = overhead._refresh(build, torch.randn(1, 8), CACHING, ignore)
    assert figure == Figure("refresh of 4 weights after a step, beside the copying", 4e6, "µs")
    assert set(refreshes[overhead.STALE]) == {4}
    assert set(refreshes[overhead.FRESH] + refreshes[overhead.COPYING]) == {0}


@pytest.mark.slow
def test_overhead_has_the_call_above_the_limit_and_the_refresh() -> None:
    outcomes = list(CASES["overhead"].run(TINY, ignore))
    figures = {o.name: o.value for o in outcomes if isinstance(o, Figure)}
    [comparison] = [o for o in outcomes if isinstance(o, Comparison)]
    differences = [ours - limit for ours, limit in comparison.rounds(AMP_FX, LIMIT)]
    above = figures["a call of amp_fx, above limit, round by round"]
    assert above == pytest.approx(1e6 * statistics.median(differences))
    assert "refresh of 4 weights after a step, beside the copying" in figures


def test_a_block_of_several_calls_is_divided_by_their_number(clock: Clock) -> None:
    """The call that warms the caches up is not timed."""
    calls: list[None] = []

    def work() -> None:
        calls.append(None)
        clock.now += 2.0

    timed = time_in_turns({"a": work}, repeats=3, steps=4, clock=clock.perf_counter)["a"]
    assert (timed.number_per_run, timed.times) == (4, [2.0] * 3)
    assert len(calls) == 3 * 5


def test_memory_counts_what_is_kept_and_what_a_call_needs() -> None:
    meter = MemoryMeter(CPU)
    weight = torch.nn.Parameter(torch.zeros(1000))
    views = weight.detach()[:10], weight.detach()[990:]

    def call() -> None:
        weight.detach() + 1 + 1  # two results alive at once

    assert meter.peak(call) == pytest.approx(3 * 4000, abs=500)
    assert all(torch.equal(view, torch.zeros(10)) for view in views)


@pytest.mark.slow
def test_serving_has_percentiles_and_throughputs_for_each_number_of_threads() -> None:
    before = torch.get_num_threads()
    outcomes = list(CASES["serving"].run(TINY, ignore))
    assert torch.get_num_threads() == before
    figures = {o.name: o.value for o in outcomes if isinstance(o, Figure)}
    assert len(figures) == len(outcomes) == len(THREADS) * (2 * 3 + 2 + 1)
    for threads in ("1 thread", "2 threads"):
        what = f"Linear(16) x6, batch 1, {threads}"
        for name in (NATIVE, AMP_FX):
            latencies = [figures[f"{what}: {name}, one client, latency p{p}"] for p in (50, 95, 99)]
            assert 0 < latencies[0] <= latencies[1] <= latencies[2]
        rates = [figures[f"{what}, 8 clients: {name}"] for name in (NATIVE, AMP_FX)]
        ratio = figures[f"{what}, 8 clients: throughput of {AMP_FX} / {NATIVE}"]
        assert ratio == pytest.approx(rates[1] / rates[0])
