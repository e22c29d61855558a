"""Policies as plain data and as files: they survive both, and mistakes name their key."""

from __future__ import annotations

import json
import re
import sys
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
MODULES = (
    "a.*",
    "*",
    "re:b\\.\\d+",
    'quoted "key" \x7f',
    nn.GroupNorm,
    re.compile("a|b", re.IGNORECASE | re.VERBOSE),
)


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
    st.tuples(st.just("with_dtype"), st.sampled_from([torch.float16, torch.bfloat16])),
    st.tuples(st.just("with_device"), st.sampled_from(["cpu", "my_device"])),
)


@hypothesis.settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    st.sampled_from(["torch", "ipex", "lean", "router"]), st.lists(CHANGES, max_size=6)
)
@hypothesis.example("torch", [("with_ops", {"mm": "fp32"}), ("with_ops", {"*mm": "keep"})])
@hypothesis.example("torch", [("with_ops", {"mm": "fp32"}), ("with_ops", {"mm": "keep"})])
@hypothesis.example(  # a view is not cast: of the two, only ``keep`` is for ``linalg_diagonal``
    "torch",
    [
        ("with_ops", {"linalg_*": "fp32"}),
        ("with_device", "cpu"),
        ("with_ops", {"linalg_*": "keep"}),
    ],
)
def test_any_policy_survives_a_file_and_json(tmp_path: Path, name: str, changes: list[Any]) -> None:
    policy = preset(name)
    try:
        for method, argument in changes:
            policy = getattr(policy, method)(argument)
    except PolicyError:
        hypothesis.assume(False)  # an op named twice
    policy = policy.with_args("index_add", {"source": "same_as:self"})
    path = tmp_path / "amp.toml"
    policy.save(path)
    assert path.read_text() == str(policy)
    for again in (Policy.load(path), Policy.from_dict(json.loads(json.dumps(policy.to_dict())))):
        assert again == policy
        assert again.name == policy.name
        assert again.to_dict() == policy.to_dict()


@pytest.mark.parametrize(
    "policy",
    [
        Policy("mine", {"cpu": {"aten::mm": CastPolicy.FP32}}).with_ops({"exp": "keep"}),
        Policy("no devices", {}),
    ],
    ids=lambda policy: policy.name,
)
def test_a_policy_of_other_tables_survives(policy: Policy) -> None:
    again = Policy.from_dict(policy.to_dict())
    assert again == policy
    assert again.name == policy.name


def test_a_file_by_hand(tmp_path: Path) -> None:
    (tmp_path / "amp.toml").write_text(
        """
        base = "lean"                       # a comment
        dtype = { cuda = "float16" }
        [ops]
        softmax = "lower_precision_fp"
        [modules]
        "decoder.*.norm" = "fp32"
        "class:torch.nn.GroupNorm" = "keep"
        [args]
        index_add = { source = "same_as:self" }
        """
    )
    expected = preset("lean").with_dtype(torch.float16, "cuda")
    expected = expected.with_ops({"softmax": "lower_precision_fp"})
    expected = expected.with_modules({"decoder.*.norm": "fp32", nn.GroupNorm: "keep"})
    expected = expected.with_args("index_add", {"source": "same_as:self"})
    assert Policy.load(tmp_path / "amp.toml") == expected


def test_everywhere_a_policy_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "amp.toml"
    DEFAULT.with_ops({"linear": "fp32"}).save(path)
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    for given in (path, str(path)):
        options: dict[str, Any] = {"policy": given, "output_dtype": "autocast"}
        assert compiled(net, **options)(x).dtype == torch.float32
        fast = amp_fx.compile(net, policy=given, options={"compiler": "eager"})
        assert fast(x).dtype == torch.float32
        amp_fx.autocast("cpu", policy=given)
    with torch.autocast("cpu"):
        assert net(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = ", "is not valid TOML: .*line 1"),
        ("bse = 'torch'", "unknown key 'bse': .*did you mean 'base'"),
        ("base = 'torh'", "there is no preset 'torh'"),
        ("base = 3", "key 'base': expected a string, got 3"),
        ("dtype = 'float64'", "expected dtype to be .*'float64'"),
        ("dtype = 3", "key 'dtype': expected a string or a table, got 3"),
        ("[dtype]\ncuda = 'int8'", "expected dtype to be .*'int8'"),
        ("[ops]\nmm = 'fp32'\nlinearr = 'fp32'", "'linearr'.*aten::linear"),
        ("[ops]\n'aten::mm' = 'fp33'", "'aten::mm'.*did you mean 'fp32'"),
        ("[ops]\nmm = 'fp32'\n'aten::mm' = 'keep'", "aten::mm has contradictory"),
        ("[[ops]]\nmm='fp32'\n[[ops]]\nmm='no'", "op 'mm'.*'no'"),
        ("ops = 3", "key 'ops': expected a table or a list, got 3"),
        ("ops = [3]", "key 'ops': expected a table, got 3"),
        ("tables = { cpu = 3 }", "key 'tables.cpu': expected a table, got 3"),
        ("[modules]\n're:(' = 'fp32'", "module 're:[(]'.*not a regular expression"),
        ("[modules]\n'class:torch.nn.Nope' = 'fp32'", "'class:torch.nn.Nope': no imported module"),
        ("[modules]\n'class:torch.nn.Module' = 'fp33'", "expected one of .*, got 'fp33'"),
        ("[args]\nindex_add = { x = 'fp32' }", "op 'index_add': expected one of"),
        ("[args]\nindex_add = 3", "with_args expected a mapping"),
        ("[float8]\nrecip = 'rowwise'", "key 'float8': expected one of .*, got 'recip'"),
        ("rules = ['os:system']", "unknown key 'rules'"),
        (f"x = {'[' * 5000}{']' * 5000}", "is not valid TOML: maximum recursion"),
        (f"format = {'1' * 5000}", "is not valid TOML: "),
        ("devices = ['gpu']", "key 'devices': 'gpu' has no table"),
        ("[tables.cpu]\nmmm = 'fp32'", "no op 'mmm'; similar names"),
    ],
)
def test_mistakes_name_the_file_and_the_entry(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "amp.toml").write_text(f"{text}\n")
    with pytest.raises(PolicyError, match=rf"amp.toml': .*{message}"):
        Policy.load(tmp_path / "amp.toml")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nothing.toml': it cannot be read"):
        Policy.load(tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match=r"bytes.toml': it cannot be read"):
        Policy.load(tmp_path / "bytes.toml")
    with pytest.raises(OptionError, match="or the path of a policy file"):
        Options.parse({"policy": 3})


def test_a_class_without_a_name_cannot_be_saved(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(PolicyError, match="class Local cannot be saved"):
        DEFAULT.with_modules({Local: "fp32"}).save(tmp_path / "amp.toml")
    assert not list(tmp_path.iterdir())


MODULE = """
import sys, torch
sys.amp_fx_ran.append(__name__)
class Norm(torch.nn.Module): pass
def __getattr__(name): sys.amp_fx_ran.append(name)
"""


def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is only found in a module that is already imported."""
    (tmp_path / "amp_fx_theirs.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "amp_fx_theirs", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    ran: list[str] = []
    monkeypatch.setattr(sys, "amp_fx_ran", ran, raising=False)
    entries = {"modules": {"class:amp_fx_theirs.Norm": "fp32"}}
    with pytest.raises(PolicyError, match="import its module before"):
        Policy.from_dict(entries)
    assert ran == []
    module = __import__("amp_fx_theirs")
    assert Policy.from_dict(entries).modules[0].pattern is module.Norm
    with pytest.raises(PolicyError, match="no imported module"):
        Policy.from_dict({"modules": {"class:amp_fx_theirs.Other": "fp32"}})
    assert ran == ["amp_fx_theirs"]


@pytest.mark.parametrize("is_list", [False, True])
def test_many_entries_cost_as_many_steps(is_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts steps instead of time: a copy of the policy per entry took 22 s for 20,000."""
    copies: list[Any] = []
    after = Policy.__post_init__

    def counted(policy: Policy) -> None:
        copies.append(policy)
        after(policy)

    monkeypatch.setattr(Policy, "__post_init__", counted)
    groups = [{f"layers.{i}": "fp32"} for i in range(500)]
    merged = {key: value for group in groups for key, value in group.items()}
    policy = Policy.from_dict({"modules": groups if is_list else merged})
    assert [m.pattern for m in policy.modules] == [*merged]
    assert len(copies) < 5
