"""Classes of errors: older names still catch them, with the Python classes that they had."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import errors

OLDER = {
    "DeviceError": (ValueError,),
    "DrawError": (ValueError,),
    "KeepError": (ValueError,),
    "CompileTargetError": (TypeError,),
    "ScalerTypeError": (TypeError,),
    "AccuracyError": (RuntimeError,),
    "AheadOfTimeError": (RuntimeError,),
    "ExplainError": (RuntimeError,),
    "ExportError": (RuntimeError,),
    "NativeBuildError": (RuntimeError,),
    "SearchError": (RuntimeError,),
    "ShardingError": (RuntimeError,),
    "StoreError": (RuntimeError,),
    "Float16GradientError": (ValueError,),
    "ScalerStateDictError": (RuntimeError, KeyError, ValueError),
    "ScalerStateError": (RuntimeError, AssertionError),
    "ScalerValueError": (ValueError, AssertionError),
}


@pytest.mark.parametrize("name", OLDER)
def test_an_older_name_is_a_class_with_the_same_bases(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.AmpFxError)
    assert all(issubclass(kind, base) for base in OLDER[name])
    assert str(kind("a message")) == "a message"


def test_the_older_warning_is_a_warning() -> None:
    assert issubclass(errors.ShardingWarning, UserWarning)


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
