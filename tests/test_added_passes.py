"""added_passes: passes of a user's own, and passes that are switched off."""

from __future__ import annotations

import dataclasses
import logging
import runpy
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import amp_fx
from amp_fx import stats, weight_cache
from amp_fx.backend import added_passes
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.pipeline import AOT_PASSES, aot_passes, packing_passes, run_passes
from amp_fx.errors import OptionError, PassError
from amp_fx.graphs.conditions import SITES_KNOWN
from amp_fx.options import DISABLE_ENVIRONMENT, Options
from amp_fx.passes.base import PassResult
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.wrap_opaque_nodes import WrapOpaqueNodes
from amp_fx.weights.pack import Constants
from tests import needs
from tests.programs import capture_program, compiled, site
from tests.snippets import ROOT, fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import fx


@dataclasses.dataclass(frozen=True)
class SinToCos:
    """Makes every sine a cosine, so that it shows."""

    name: ClassVar[str] = "sin_to_cos"

    def call(self, gm: fx.GraphModule) -> PassResult:
        nodes = gm.graph.find_nodes(op="call_method", target="sin")
        for node in nodes:
            node.target = "cos"
        return PassResult(Counter(sines=len(nodes)))


@dataclasses.dataclass(frozen=True)
class Keyed(SinToCos):
    """``SinToCos`` with a key."""

    cache_key: str = "1"


class Other(SinToCos):
    """``SinToCos`` under another name."""

    name = "other"


class NoOp(SinToCos):
    """``SinToCos`` under a third name."""

    name = "no_op"


@pytest.fixture(autouse=True)
def _none_registered() -> Iterator[None]:
    yield
    added_passes._registered.clear()


def program(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


X = torch.randn(3)


def test_a_pass_given_as_an_option_runs() -> None:
    torch.testing.assert_close(compiled(program, passes=[SinToCos()])(X), X.cos())
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(program)(X), X.sin())


def test_a_registered_pass_runs_until_it_is_taken_out() -> None:
    handle = amp_fx.register_pass(SinToCos(), after="insert_casts")
    torch.testing.assert_close(compiled(program)(X), X.cos())
    torch._dynamo.reset()
    handle.remove()
    torch.testing.assert_close(compiled(program)(X), X.sin())


def test_it_shows_up_in_counts_and_explain() -> None:
    stats.reset()
    compiled(program, passes=[SinToCos()])(X)
    assert stats.snapshot()["sines"] == 1
    amp_fx.register_pass(SinToCos())
    [graph] = amp_fx.explain(program)(X).graphs
    assert dict(graph.counts) == {"sines": 1}
    assert [node.op for node in graph.nodes if node.kind == "op"] == [".cos"]


def names(**options: Any) -> list[str]:
    parsed = Options.parse(options)
    built_in = (MarkRegions(site()), FoldCasts(), WrapOpaqueNodes())
    return [p.name for p in added_passes.with_added(built_in, parsed.passes, parsed.disable_passes)]


def test_order() -> None:
    amp_fx.register_pass(SinToCos(), after="mark_regions")
    assert names() == ["mark_regions", "sin_to_cos", "fold_casts", "wrap_opaque_nodes"]
    amp_fx.register_pass(SinToCos(), after="store_weights_low")  # which does not run
    assert names() == ["mark_regions", "fold_casts", "sin_to_cos", "wrap_opaque_nodes"]
    amp_fx.register_pass(Other(), after="sin_to_cos")
    assert names() == ["mark_regions", "fold_casts", "sin_to_cos", "other", "wrap_opaque_nodes"]
    amp_fx.register_pass(SinToCos())
    assert names(passes=[NoOp()])[1:5] == ["fold_casts", "sin_to_cos", "other", "no_op"]


def test_disabled_passes_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    amp_fx.register_pass(SinToCos())
    assert names(disable_passes=["fold_casts"]) == [
        "mark_regions",
        "sin_to_cos",
        "wrap_opaque_nodes",
    ]
    monkeypatch.setenv(DISABLE_ENVIRONMENT, "fold_casts,sin_to_cos")
    assert names() == ["mark_regions", "wrap_opaque_nodes"]
    torch.testing.assert_close(compiled(program)(X), X.sin())


@dataclasses.dataclass(frozen=True)
class AtenSinToCos(SinToCos):
    """The same in a graph of AOTAutograd."""

    name: ClassVar[str] = "aten_sin_to_cos"
    error: Exception | None = None

    def call(self, gm: fx.GraphModule) -> PassResult:
        if self.error is not None:
            raise self.error
        nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        for node in nodes:
            node.target = torch.ops.aten.cos.default
        return PassResult(Counter(sines=len(nodes)))


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=needs.CPP_COMPILER)]
)
def test_a_pass_on_graphs_of_aot_autograd(compiler: str) -> None:
    """The tuple of the pass that it runs after decides."""
    amp_fx.register_pass(AtenSinToCos(), after="narrow_gathers")
    amp_fx.register_pass(SinToCos(), after="fold_casts")
    torch.testing.assert_close(compiled(lambda x: x.sin(), compiler=compiler)(X), X.cos())
    torch._dynamo.reset()
    added_passes._registered.pop("sin_to_cos")
    torch.testing.assert_close(compiled(lambda x: x.sin(), compiler=compiler)(X), X.cos())


@pytest.mark.parametrize(
    ("after", "before"),
    [
        ("fold_casts", "hoist_casts, fold_casts"),
        ("narrow_gathers", "record_values, .*narrow_gathers"),
    ],
)
def test_an_error_of_a_pass_names_it_and_what_ran_before(after: str, before: str) -> None:
    amp_fx.register_pass(AtenSinToCos(error=ZeroDivisionError("why")), after=after)
    expected = f"pass 'aten_sin_to_cos' failed after .*{before}: ZeroDivisionError: why"
    with pytest.raises((PassError, BackendCompilerFailed), match=expected):
        compiled(program, compiler="aot_eager", fallback=False)(X)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pass_takes_the_place_of_one_that_does_not_run(is_packed: bool) -> None:
    """Also if passes before it run a second time later."""
    packing = packing_passes(Constants({}), {}, Options(), is_strict=False, is_channels_last=True)
    passes = aot_passes(
        Options(),
        None,
        stage="inference",
        num_returned=1,
        is_inductor=True,
        is_strict=False,
        moving=(),
        packing=packing if is_packed else (),
    )
    order = [kind.name for kind in AOT_PASSES]
    for name in order:
        handle = amp_fx.register_pass(AtenSinToCos(), after=name)
        others = [each for each in passes if each.name != name]
        run = [each.name for each in added_passes.with_added(others, (), (), is_aot=True)]
        handle.remove()
        ranks = [order.index(each) for each in run if each != "aten_sin_to_cos"]
        place = run.index("aten_sin_to_cos")
        assert all(rank < order.index(name) for rank in ranks[:place])
        assert all(rank > order.index(name) or rank in ranks[:place] for rank in ranks[place:])


@needs.HOOK
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_cached", [True, False])
def test_cached_casts_of_different_weights_are_counted(num_layers: int, is_cached: bool) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(num_layers)])
    weight_cache.clear()
    stats.reset()
    with torch.no_grad():
        compiled(model, compiler="aot_eager", weight_cache=is_cached)(torch.ones(1, 2))
    num_cached = 2 * num_layers * is_cached
    assert stats.snapshot().get("weight_casts_kept", 0) == num_cached
    assert len(weight_cache.stats().values) == num_cached


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disable_passes": ["fold_cast"]}, "did you mean 'fold_casts'"),
        ({"disable_passes": ["insert_casts"]}, "would be wrong without the pass 'insert_casts'"),
        ({"disable_passes": ["constants_to_inputs"]}, "would be wrong without"),
        ({"disable_passes": ["copy_returned_inputs"]}, "would be wrong without"),
        ({"disable_passes": ["wrap_opaque_nodes"]}, "would be wrong without"),
        ({"disable_passes": "fold_casts"}, "not a list of names"),
        ({"passes": SinToCos()}, "not a list of passes"),
        ({"passes": [SinToCos]}, "is not a pass"),
        ({"passes": [FoldCasts()]}, "is the name of a pass of amp_fx"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        added_passes.check_passes(Options.parse(options))
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(program, **options)(X)


def test_mistakes_elsewhere_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="there is no pass 'nothing'"):
        amp_fx.register_pass(SinToCos(), after="nothing")
    monkeypatch.setenv(DISABLE_ENVIRONMENT, "mark_regions")
    with pytest.raises(OptionError, match=DISABLE_ENVIRONMENT):
        added_passes.check_passes(Options.parse({}))


@pytest.mark.one_in(3)
@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("added", "tag", "is_cached"),
    [([], "", True), ([Keyed()], "sin_to_cos=1", True), ([SinToCos()], "sin_to_cos=", False)],
)
def test_cache_keys_have_the_pass(
    added: list[Any], tag: str, is_cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pass that gives no key keeps its graphs out, backward graphs too."""
    seen: list[tuple[str, bool, bool]] = []
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner

    def spy(*args: Any, **kwargs: Any) -> Any:
        caches = inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache
        seen.append((torch.compiler.config.cache_key_tag, *caches))
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", spy)
    x = X.clone().requires_grad_()
    call: Callable[..., Any] = compiled(program, compiler="inductor", passes=added)
    call(x).sum().backward()
    assert tag in seen[0][0]
    assert [in_cache for _, in_cache, _ in seen] == [is_cached] * 2, "forward and backward"
    assert seen[0][2] == is_cached


def test_what_a_pass_requires_and_ensures_is_checked() -> None:
    @dataclasses.dataclass(frozen=True)
    class AddsNode:
        name: ClassVar[str] = "adds_node"
        ensures: ClassVar[Any] = (SITES_KNOWN,)

        def call(self, gm: fx.GraphModule) -> PassResult:
            with gm.graph.inserting_before(gm.graph.output_node()):
                gm.graph.call_function(torch.ones, (1,))
            return PassResult(Counter(added=1))

    captured = capture_program(lambda x: x.relu(), X)
    with pytest.raises(PassError, match=r"'fold_casts' failed after no other .*: .*requires that"):
        run_passes(captured.gm, [FoldCasts()])
    with pytest.raises(PassError, match=r"after mark_regions: .*ensures that every node knows"):
        run_passes(captured.gm, [MarkRegions(site()), AddsNode()])


def returning(outputs: Callable[[Any], Any]) -> Callable[[fx.GraphModule], None]:
    def edit(gm: fx.GraphModule) -> None:
        node = gm.graph.output_node()
        node.args = (outputs(node.args[0]),)

    return edit


def add_input(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")


EDITS: dict[str, Callable[[fx.GraphModule], None]] = {
    "no output": lambda gm: gm.graph.erase_node(gm.graph.output_node()),
    "returns nothing": returning(lambda _: ()),
    "returns None": returning(lambda _: (None,)),
    "returns twice": returning(lambda outputs: outputs * 2),
    "another input": add_input,
}


@pytest.mark.falls_back
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("is_counted", [True, False])
def test_a_pass_cannot_change_what_goes_in_and_out(
    edit: Callable[[fx.GraphModule], None], is_counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph then runs without any pass, with one warning."""

    class Edit:
        name = "edit"

        def call(self, gm: fx.GraphModule) -> PassResult:
            edit(gm)
            return PassResult(Counter(edits=int(is_counted)))

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    x = torch.eye(2)
    with caplog.at_level(logging.WARNING, "amp_fx"):
        assert torch.equal(compiled(program, passes=[Edit()])(x), x)
    [message] = [record.getMessage() for record in caplog.records]
    assert "pass 'edit' failed" in message
    assert "inputs of the graph, or the number and structure of its outputs" in message
    torch._dynamo.reset()
    with pytest.raises(Exception, match="pass 'edit' failed"):
        compiled(program, passes=[Edit()], fallback=False)(x)


def test_the_pass_of_the_documentation(tmp_path: Path) -> None:
    [code] = fenced(ROOT / "docs" / "guide" / "write-a-pass.md", "python")
    (tmp_path / "write_a_pass.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / "write_a_pass.py"))


@pytest.mark.parametrize("after", ["fold_casts", "narrow_gathers"])
@pytest.mark.parametrize("is_view", [False, True])
def test_a_pass_cannot_return_an_input(after: str, is_view: bool) -> None:
    """The program writes to what it got, which must not change the input."""

    class Remove:
        name: ClassVar[str] = "remove"

        def call(self, gm: fx.GraphModule) -> PassResult:
            [node] = [n for n in gm.graph.nodes if "mul" in str(n.target)]
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
            return PassResult(Counter(removed=1))

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1) if is_view else x) * 1.0

    amp_fx.register_pass(Remove(), after=after)
    with pytest.raises(Exception, match="which outputs share memory"):
        compiled(program, compiler="aot_eager", fallback=False)(torch.ones(2, 2))


def test_a_pass_may_give_a_new_node_the_value_of_an_input() -> None:
    class Replace:
        name: ClassVar[str] = "replace"

        def call(self, gm: fx.GraphModule) -> PassResult:
            [node] = gm.graph.find_nodes(op="call_method", target="sin")
            with gm.graph.inserting_before(node):
                new = gm.graph.call_method("cos", node.args)
            new.meta = {**node.meta, "val": node.all_input_nodes[0].meta["val"]}
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            return PassResult(Counter(replaced=1))

    amp_fx.register_pass(Replace(), after="fold_casts")
    found = compiled(lambda x: x.sin(), compiler="aot_eager", fallback=False)(X)
    torch.testing.assert_close(found, X.cos())
