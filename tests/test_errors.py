"""Classes of errors, and what one call alone says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import errors

BASES = {
    "AmpFxError": Exception,
    "OptionError": ValueError,
    "ArgumentTypeError": TypeError,
    "PolicyError": ValueError,
    "StaleWeightError": RuntimeError,
    "UnsupportedError": RuntimeError,
    "PassError": Exception,
    "ScalerStateError": RuntimeError,
    "ScalerAssertionError": AssertionError,
    "PolicyWarning": UserWarning,
    "DtypeWarning": UserWarning,
}


def test_each_class_has_one_builtin_base() -> None:
    """Excludes ``RegionError``, because torch raises either of its two bases."""
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert all(kind.__name__ == name for name, kind in classes.items())
    assert {*classes} == {*BASES, "RegionError"}
    for name, base in BASES.items():
        assert [each for each in classes[name].__mro__ if each.__module__ == "builtins"] == [
            *base.__mro__
        ]
        assert str(classes[name]("a message")) == "a message"
    assert issubclass(errors.RegionError, (RuntimeError, ValueError))


SECOND_CALLS: dict[str, dict[str, Any]] = {
    "explain": {},
    "accuracy": {},
    "audit": {},
    "record": {},
    "verify": {},
    "store_low": {},
    "search": {"tolerance": 0.1},
}


@pytest.mark.parametrize("name", SECOND_CALLS)
def test_one_call_alone_says_that_another_one_is_missing(name: str) -> None:
    made = getattr(amp_fx, name)(torch.nn.Linear(2, 2).eval(), **SECOND_CALLS[name])
    text = f"amp_fx.{name}(model)(x)"
    assert text in repr(made)
    with pytest.warns(UserWarning, match=rf"does nothing until it is called: .*{name}\(model\)\(x"):
        del made


def test_nothing_is_said_after_a_second_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain = amp_fx.explain(torch.nn.Linear(2, 2))
        assert explain(torch.ones(1, 2)).model == "Linear"
        with pytest.raises(errors.UnsupportedError):
            explain(torch.ones(1, 3))
        del explain
