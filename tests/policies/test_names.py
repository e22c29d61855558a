"""names: a policy file runs no code that its reader does not trust."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from amp_fx import Policy
from amp_fx.errors import PolicyError
from amp_fx.policies.policy import as_policy

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
import sys, torch
sys.amp_fx_ran.append(__name__)
class Norm(torch.nn.Module): pass
def rule(op, path, shapes, dtypes): return None
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that were run, of two packages that a file may name."""
    found: list[str] = []
    for package in ("amp_fx_theirs", "amp_fx_others"):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "parts.py").write_text(MODULE)
        (folder / "leaves.py").write_text("raise SystemExit(3)")
        for name in ("", ".parts", ".leaves"):
            monkeypatch.delitem(sys.modules, f"{package}{name}", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "amp_fx_ran", found, raising=False)
    return found


RULE = "rules = ['amp_fx_theirs.parts:rule']\n"
CLASS = "[modules]\n'class:amp_fx_theirs.parts.Norm' = 'fp32'\n"


@pytest.mark.parametrize("text", [RULE, CLASS])
def test_nothing_is_imported_unless_asked(text: str, ran: list[str], tmp_path: Path) -> None:
    path = tmp_path / "amp.toml"
    path.write_text(text)
    for load in (Policy.loads, as_policy):
        with pytest.raises(PolicyError, match=r"trusted=\['amp_fx_theirs.parts'\]"):
            load(text)
    for trusted in (False, [], ["amp_fx_others"], ["amp_fx_their"]):
        with pytest.raises(PolicyError, match=r"line 1|line 2"):
            Policy.load(path, trusted=trusted)
    assert not ran
    allowed: tuple[Any, ...] = (True, ["amp_fx_theirs"], ("amp_fx_others", "amp_fx_theirs.parts"))
    for trusted in allowed:
        policy = Policy.load(path, trusted=trusted)
        assert policy.rules or policy.modules
    assert ran == ["amp_fx_theirs.parts"]


def test_a_class_of_a_module_that_is_imported_needs_no_trust(ran: list[str]) -> None:
    assert Policy.loads("[modules]\n'class:torch.nn.GroupNorm' = 'keep'\n").modules
    __import__("amp_fx_theirs.parts")
    assert Policy.loads(CLASS).modules
    with pytest.raises(PolicyError, match="a function that would be called"):
        Policy.loads(RULE)
    assert ran == ["amp_fx_theirs.parts"]


def test_a_function_of_the_standard_library_is_not_called() -> None:
    with pytest.raises(PolicyError, match=r"'os:system' is a function that would be called"):
        Policy.loads("rules = ['os:system']\n")


@pytest.mark.parametrize(
    "text",
    [
        CLASS.replace("fp32", "fp33"),
        "base = 'nothing'\n" + CLASS,
        "[modules]\n'class:amp_fx_theirs.parts.Norm' = 'fp32'\n'class:amp_fx_others.x' = 'fp32'\n",
        "rules = ['amp_fx_theirs.parts:rule', 'amp_fx_others.parts:rule']\n",
    ],
)
def test_entries_that_are_refused_were_not_imported(text: str, ran: list[str]) -> None:
    with pytest.raises(PolicyError):
        Policy.loads(text, trusted=["amp_fx_theirs"])
    assert not ran


@pytest.mark.parametrize("kind", ["rule", "class"])
def test_a_module_that_leaves_is_an_error(kind: str, ran: list[str]) -> None:
    text = RULE if kind == "rule" else CLASS
    with pytest.raises(PolicyError, match="SystemExit: 3"):
        Policy.loads(text.replace("parts", "leaves"), trusted=True)
    assert not ran


def test_a_name_alone_is_no_list_of_modules() -> None:
    with pytest.raises(PolicyError, match="expected trusted to be a list"):
        Policy.loads("", trusted="amp_fx_theirs")


@pytest.mark.parametrize("head", ["[modules]\n", "[[modules]]\n"])
def test_many_entries_cost_as_many_steps(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: a copy of the policy for each entry took 22 s for 20,000."""
    copies: list[Any] = []
    after = Policy.__post_init__

    def counted(policy: Policy) -> None:
        copies.append(policy)
        after(policy)

    monkeypatch.setattr(Policy, "__post_init__", counted)
    lines = [f'"layers.{i}" = "fp32"\n' for i in range(500)]
    text = head + "".join(lines) if head == "[modules]\n" else "".join(head + x for x in lines)
    policy = Policy.loads(text)
    assert [m.pattern for m in policy.modules] == [f"layers.{i}" for i in range(500)]
    assert len(copies) < 5
