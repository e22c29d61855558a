"""files: what is written is read back, and mistakes are told with line and key."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import amp_fx
from amp_fx import CastPolicy, Policy, preset
from amp_fx.errors import OptionError, PolicyError
from amp_fx.options import Options
from amp_fx.policies.changes import MODULE_POLICIES
from tests.programs import compiled

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT = Policy.default()
OPS = ("softmax", "aten::softmax.int", "linalg_*", "*mm", "mm", "aten::exp", "layer_norm")
MODULES = ("a.*", "*", "re:b\\.\\d+", 'quoted "key"', nn.GroupNorm, re.compile("a|b"))


def a_rule(*_: Any) -> None:
    """A rule that can be imported."""


def values(policies: Any) -> st.SearchStrategy[str]:
    return st.sampled_from([p.value for p in policies])


SIMPLE = (
    CastPolicy.FP32,
    CastPolicy.LOWER_PRECISION_FP,
    CastPolicy.KEEP,
    CastPolicy.SAME_AS_INPUT,
    CastPolicy.LOWER_PRECISION_IO,
    CastPolicy.DEMOTE,
)
CHANGES = st.one_of(
    st.tuples(st.just("with_ops"), st.dictionaries(st.sampled_from(OPS), values(SIMPLE))),
    st.tuples(
        st.just("with_modules"),
        st.dictionaries(
            st.sampled_from(MODULES),
            values(MODULE_POLICIES)
            | st.dictionaries(st.sampled_from(OPS), values(MODULE_POLICIES)),
        ),
    ),
    st.tuples(st.just("with_rule"), st.just(a_rule)),
    st.tuples(st.just("with_dtype"), st.sampled_from([torch.float16, torch.bfloat16])),
    st.tuples(st.just("with_device"), st.sampled_from(["cpu", "my_device"])),
)


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.sampled_from(["torch", "ipex", "lean"]), st.lists(CHANGES, max_size=6))
@hypothesis.example("torch", [("with_ops", {"mm": "fp32"}), ("with_ops", {"*mm": "keep"})])
@hypothesis.example(  # a view is not cast: of the two, only ``keep`` is for ``linalg_diagonal``
    "torch",
    [
        ("with_ops", {"linalg_*": "fp32"}),
        ("with_device", "cpu"),
        ("with_ops", {"linalg_*": "keep"}),
    ],
)
def test_any_policy_survives_its_text(name: str, changes: list[Any]) -> None:
    policy = preset(name)
    try:
        for method, argument in changes:
            policy = getattr(policy, method)(argument)
    except PolicyError:
        hypothesis.assume(False)  # an op named twice
    policy = policy.with_args("index_add", {"source": "same_as:self"})
    again = Policy.loads(str(policy), trusted=True)
    assert again == policy
    assert again.name == policy.name
    assert str(again) == str(policy)


def test_a_reason_is_a_comment_above_its_line() -> None:
    policy = DEFAULT.with_modules({"h.0": {"mm": "fp32", "exp": "keep"}, "head": "fp32"})
    reasons = ("too large:\n|x| up to 1e5", "", "why not")
    told = [dataclasses.replace(m, why=why) for m, why in zip(policy.modules, reasons, strict=True)]
    text = str(dataclasses.replace(policy, modules=tuple(told)))
    assert text.splitlines()[-5:] == [
        "[modules]",
        "# mm: too large: |x| up to 1e5",
        '"h.0" = { mm = "fp32", exp = "keep" }',
        "# why not",
        'head = "fp32"',
    ]
    assert Policy.loads(text) == policy


def test_a_policy_of_other_tables_survives_its_text() -> None:
    policy = Policy("mine", {"cpu": {"aten::mm": CastPolicy.FP32}}).with_ops({"exp": "keep"})
    again = Policy.loads(str(policy))
    assert again == policy
    assert again.name == "mine"


def test_a_file_by_hand() -> None:
    policy = Policy.loads(
        """
        base = "lean"                       # a comment
        dtype = { cuda = "float16" }
        rules = ["tests.policies.test_files:a_rule"]
        [ops]
        softmax = "lower_precision_fp"
        [modules]
        "decoder.*.norm" = "fp32"
        "class:torch.nn.GroupNorm" = "keep"
        [args]
        index_add = { source = "same_as:self" }
        """,
        trusted=["tests.policies"],
    )
    expected = preset("lean").with_dtype(torch.float16, "cuda").with_rule(policy.rules[0].function)
    expected = expected.with_ops({"softmax": "lower_precision_fp"})
    expected = expected.with_modules({"decoder.*.norm": "fp32", nn.GroupNorm: "keep"})
    assert policy == expected.with_args("index_add", {"source": "same_as:self"})


def test_everywhere_a_policy_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "amp.toml"
    DEFAULT.with_ops({"linear": "fp32"}).save(path)
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    options: dict[str, Any] = {"output_dtype": "autocast"}
    assert compiled(net, policy=str(path), **options)(x).dtype == torch.float32
    assert compiled(net, policy=path.read_text(), **options)(x).dtype == torch.float32
    assert amp_fx.compile(net, policy=path, options={"compiler": "eager"})(x).dtype == torch.float32
    with amp_fx.autocast("cpu", policy=str(path)):
        assert net(x).dtype == torch.float32
    with torch.autocast("cpu"):
        assert net(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = ", "is not valid TOML: .*line 1"),
        ("\nbse = 'torch'", "line 2, key 'bse': unknown.*did you mean 'base'"),
        ("base = 'torh'", "line 1, key 'base': there is no preset 'torh'"),
        ("base = 3", "line 1, key 'base': expected a string, got 3"),
        ("format = 99", "line 1, key 'format': expected 1, got 99"),
        ("dtype = 'float64'", "line 1, key 'dtype': expected dtype to be"),
        ("[dtype]\ncuda = 'int8'", "line 2, key 'dtype.cuda'"),
        ("[ops]\nmm = 'fp32'\nlinearr = 'fp32'", "line 3, key 'ops.linearr': .*aten::linear"),
        ("[ops]\n'aten::mm' = 'fp33'", "line 2, key 'ops.aten::mm': .*did you mean 'fp32'"),
        ("[ops]\nmm = 'fp32'\n'aten::mm' = 'keep'", "key 'ops': aten::mm has contradictory"),
        ("[[ops]]\nmm='fp32'\n[[ops]]\nmm='no'", "line 4, key 'ops.mm'"),
        ("ops = 3", "line 1, key 'ops': expected a table, got 3"),
        ("[modules]\n're:(' = 'fp32'", "line 2, key 'modules.re:[(]': .*not a regular expression"),
        (
            "[modules]\n'class:torch.nn.Nope' = 'fp32'",
            "line 2.*is not in a module that is already imported",
        ),
        ("[modules]\n'class:torch.nn.Module' = 'fp33'", "line 2.*expected one of .*, got 'fp33'"),
        ("[args]\nindex_add = { x = 'fp32' }", "line 2, key 'args.index_add'"),
        ("rules = ['nowhere:f']", "line 1, key 'rules': 'nowhere:f' is a function .*trusted"),
        ("rules = [3]", "line 1, key 'rules': expected a string, got 3"),
        (f"x = {'[' * 5000}{']' * 5000}", "is not valid TOML: maximum recursion"),
        (f"format = {'1' * 5000}", "is not valid TOML: "),
        ("devices = ['gpu']", "line 1, key 'devices': 'gpu' has no table"),
        ("[tables.cpu]\nmm = 'fp32'", "line 1, key 'tables.cpu': 'mm' is not the qualified name"),
    ],
)
def test_mistakes_are_told_with_line_and_key(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.loads(text + "\n")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nothing.toml' cannot be read"):
        Policy.load(tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match=r"bytes.toml' cannot be read"):
        Policy.load(tmp_path / "bytes.toml")
    with pytest.raises(OptionError, match="or the path of a policy file"):
        Options.parse({"policy": 3})


def test_what_has_no_name_cannot_be_saved(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(PolicyError, match="rule <lambda> cannot be saved"):
        DEFAULT.with_rule(lambda *_: None).save(tmp_path / "amp.toml")
    with pytest.raises(PolicyError, match="class Local cannot be saved"):
        DEFAULT.with_modules({Local: "fp32"}).save(tmp_path / "amp.toml")
    assert not list(tmp_path.iterdir())
