"""options: what is taken, what it becomes, and errors that say what is allowed."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from typing import Any

import pytest
import torch

from amp_fx.errors import OptionError
from amp_fx.options import COMPILERS, Options, check_device_dtype, supported_dtypes
from amp_fx.passes.base import PassResult
from amp_fx.policies.policy import preset


class NoPass:
    """Does nothing."""

    name = "no_pass"

    def call(self, _: object) -> PassResult:
        return PassResult(Counter())


def test_every_field_can_be_given() -> None:
    """Excludes ``inductor``, which takes the rest, and ``mode``, which is an option of inductor."""
    other = {
        "dtype": torch.float16,
        "policy": preset("ipex"),
        "compiler": "eager",
        "output_dtype": "autocast",
        "weight_cache": False,
        "verify": "full",
        "freezing": False,
        "fold_batch_norm": True,
        "weight_grads": "float32",
        "numerics": "strict",
        "range_guard": False,
        "narrow_gathers": False,
        "bare_region": False,
        "fallback": False,
        "passes": (NoPass(),),
        "disable_passes": ("fold_casts",),
    }
    parsed, default = Options.parse(other), Options.parse({})
    assert {f.name for f in dataclasses.fields(Options)} - {"inductor", "mode"} <= set(other)
    for name, value in other.items():
        assert getattr(parsed, name) == value
        assert getattr(default, name) != value


def test_none_and_empty_are_the_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options()


FIELDS = {field.name: field.default for field in dataclasses.fields(Options)}


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "inductor"])
def test_none_is_an_option_if_it_is_the_default(name: str) -> None:
    if FIELDS[name] is None:
        assert Options.parse({name: None}) == Options()
        assert Options.parse({name: None, "compiler": "eager"}) == Options(compiler="eager")
    else:
        with pytest.raises(OptionError, match=f"{name}=None"):
            Options.parse({name: None})


def test_none_does_not_hide_what_another_option_implies() -> None:
    none = {"weight_grads": None, "fold_batch_norm": None, "mode": None}
    assert Options.parse({"numerics": "eager", **none}) == Options.parse({"numerics": "eager"})
    assert Options.parse(none, mode="reduce-overhead").mode == "reduce-overhead"


def test_options_of_inductor_are_kept_for_it() -> None:
    """Relies on ``torch._inductor.config.get_config_copy`` naming all of them."""
    parsed = Options.parse({"max_autotune": True, "epilogue_fusion": False})
    assert dict(parsed.inductor) == {"max_autotune": True, "epilogue_fusion": False}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("name", "meant"),
    [("dtyp", "dtype"), ("weight-cache", "weight_cache"), ("max_autotun", "max_autotune")],
)
def test_an_unknown_option_is_told_with_the_nearest_name(
    name: str, meant: str, compiler: str
) -> None:
    with pytest.raises(OptionError) as raised:
        Options.parse({name: True, "compiler": compiler})
    assert str(raised.value) == f"unknown option {name!r}; did you mean {meant!r}?"


NO_LOW_DTYPE = r"torch\.bfloat16(,| or) torch\.float16"
NOT_INDUCTOR = "inductor's, and compiler='{}' does not take"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"dtype": value}, NO_LOW_DTYPE)
            for value in (torch.float32, torch.int16, torch.float8_e5m2, "load", 16)
        ),
        *(({name: "yes"}, name) for name in ("weight_cache", "bare_region", "fallback")),
        ({"policy": {}}, "Policy, the name of a preset"),
        ({"zzz": 1}, r"unknown option 'zzz'; amp_fx.options.Options lists"),
        *(
            ({"compiler": name, "max_autotune": True}, NOT_INDUCTOR.format(name))
            for name in COMPILERS
            if name != "inductor"
        ),
        ({"mode": "fastest"}, "reduce-overhead"),
        (
            {"mode": "reduce-overhead", "compiler": "eager"},
            "mode='reduce-overhead' is for inductor",
        ),
        ({"max_autotune": "always"}, "max_autotune"),
        ({"verify": "often"}, r"'often'.*'sample', 'full', 'off'"),
        ({"numerics": "exact"}, "'exact' is not one of"),
    ],
    ids=str,
)
def test_what_is_wrong_is_an_error_that_says_what_is_allowed(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        Options.parse(given)


def test_mode_as_an_option_and_as_an_argument() -> None:
    """Relies on ``torch._inductor.list_mode_options`` naming all modes."""
    assert Options.parse({"mode": "reduce-overhead"}) == Options.parse({}, "reduce-overhead")
    assert Options.parse({}, "reduce-overhead").mode == "reduce-overhead"


def test_backend_of_privateuse1_says_itself_what_it_supports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = torch._C._get_privateuse1_backend_name()
    module = types.SimpleNamespace(get_amp_supported_dtype=lambda: [torch.float16])
    monkeypatch.setattr(torch, name, module, raising=False)
    assert supported_dtypes(name) == (torch.float16,)
    check_device_dtype(name, torch.float16)
    with pytest.raises(OptionError, match=r"allowed: torch\.float16$"):
        check_device_dtype(name, torch.bfloat16)


@pytest.mark.parametrize("dtype", supported_dtypes("cpu"))
def test_torch_agrees_on_what_the_cpu_supports(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("given", "meaning"), [(True, "full"), (False, "off"), ("off", "off")])
def test_verify_takes_words_and_what_it_took_before(given: object, meaning: str) -> None:
    assert Options.parse({"verify": given}).verify == meaning
