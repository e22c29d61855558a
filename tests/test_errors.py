"""Classes of errors: older names still catch them, with the Python classes that they had."""

from __future__ import annotations

import pytest

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
