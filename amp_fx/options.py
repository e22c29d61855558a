"""The options of the backend: what is allowed, and errors that say so."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.devices.low_dtypes import (
    DIFFERING,
    device_names,
    warn_of_default,
    warn_of_emulation,
    without_bfloat16,
)
from amp_fx.dtypes import as_dtype, is_low
from amp_fx.errors import OptionError, did_you_mean
from amp_fx.passes.base import check_pass
from amp_fx.policies.policy import Policy, as_policy, preset
from amp_fx.tables.lean import has_low_sums
from amp_fx.torch_private.autocast import privateuse1_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from amp_fx.passes.base import Pass

COMPILERS = ("inductor", "aot_eager", "eager")
OUTPUT_DTYPES = ("original", "autocast")
VERIFY = ("sample", "full", "off")
WEIGHT_GRADS = ("autocast", "float32")
NUMERICS = ("default", "strict_pointwise", "strict_reduction", "strict", "eager")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of ``torch.compile(..., backend="amp_fx", options={...})``."""

    dtype: torch.dtype | None = None
    """Low-precision dtype outside of a ``torch.autocast`` region, as a dtype or a name
    (``"bfloat16"``, ``"bf16"``, ``"half"``). The default is the policy's dtype, else
    ``default_dtype`` of the device."""
    policy: Policy = dataclasses.field(default_factory=lambda: preset("torch"))
    """A ``Policy``, the name of a preset, or the path of a policy file (``*.toml``). A file is
    read each time a graph is compiled."""
    compiler: str | Callable[..., Any] = "inductor"
    """``"inductor"``, ``"aot_eager"`` or ``"eager"``; or a backend of Dynamo, such as that of a
    new device: a function ``compiler(gm, example_inputs)`` that returns a callable. It gets
    each rewritten graph, with its casts, and differentiates it like any graph of Dynamo; casts
    of weights are not cached."""
    output_dtype: str = "original"
    """``"original"``: outputs have the dtypes of the uncompiled program. ``"autocast"``:
    outputs have the dtypes that autocast leaves, except values that the program reads after a
    graph break. Inside a region, both are the same."""
    weight_cache: bool | str = True
    """True caches values computed from weights across calls. ``"training"`` also caches values
    of weights that get gradients, which is faster with several micro-batches per update."""
    verify: str = "sample"
    """How much each call compares cached values with the weights. ``"sample"``: one element of
    each weight on the CPU. ``"full"`` (or True): everything; a difference raises
    ``StaleWeightError``. ``"off"`` (or False): nothing. ``amp_fx.weight_cache`` reports what
    was found."""
    freezing: bool | None = None
    """True makes cached values constants of the generated code in graphs without gradients,
    packed for its kernels and refreshed after writes. None does so on the CPU, and wherever
    inductor's own ``freezing`` is on. On accelerators, constants cannot be used together with
    inductor's CUDA graphs."""
    fold_batch_norm: bool | None = None
    """Whether batch norms are folded into packed convolutions. None folds them on the CPU, in
    bfloat16, where the result is more accurate than without folding. True folds them in float16
    and on GPUs as well, by inductor's own pass, which is less accurate."""
    weight_grads: str | None = None
    """``"float32"``: on CUDA, products that compute gradients of weights return float32, the
    dtype in which the hardware sums; this is more exact than autocast and moves fewer bytes.
    ``"autocast"``: they round to the low-precision dtype first. None: ``"float32"`` for
    policies with low-precision residual sums, such as the preset ``"lean"``."""
    numerics: str | None = None
    """Rounding in generated code. ``"eager"``: every value has the bits of eager autocast where
    torch can compute them (``amp_fx.backend.numerics``). Ops with other roundings in generated
    code run in ATen's kernels, products are not widened to float32
    (``amp_fx.passes.widen_products``), and ``range_guard`` is off. ``"strict"``,
    ``"strict_pointwise"``, ``"strict_reduction"``: inductor's own modes, since torch 2.15;
    casts that amp_fx caches or moves change no bit. None: inductor's current setting."""
    range_guard: bool = True
    """True looks for constants that the low-precision dtype cannot represent
    (``amp_fx.graphs.range_guard``). False computes eager autocast's numbers everywhere."""
    narrow_gathers: bool = True
    """True casts a tensor before it is gathered if every reader of the gathered tensor makes
    this cast (``amp_fx.passes.narrow_gathers``)."""
    bare_region: bool = True
    """True enters a region for a graph that is captured outside of an enabled autocast region.
    ``amp_fx.compile`` enters its own region and turns this off."""
    fallback: bool = True
    """True runs a graph under native autocast if it cannot be rewritten, and op by op if it or
    its backward cannot be compiled. False raises instead."""
    passes: tuple[Pass, ...] = ()
    """Your own passes (``amp_fx.passes.base.Pass``), which run after ``fold_casts``.
    ``amp_fx.register_pass`` adds a pass to every graph."""
    disable_passes: tuple[str, ...] = ()
    """Names of passes to skip, to find the one at fault. The environment variable
    ``AMP_FX_DISABLE_PASSES`` adds names, separated by commas. Passes that results depend on
    cannot be disabled."""
    mode: str | None = None
    """A mode of inductor. ``torch.compile`` takes either ``mode=`` or ``options=``; next to
    other options, pass the mode here."""
    inductor: tuple[tuple[str, Any], ...] = ()
    """All other options, passed to inductor."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Checks and converts what the user gave.

        Raises:
            OptionError: An option is unknown or has a value that is not allowed.
        """
        given = dict(options or {})
        if mode is not None and given.get("mode") is None:
            given["mode"] = mode
        parsed: dict[str, Any] = {}
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, convert in _CONVERT.items():
            if name in given:
                value = given.pop(name)
                is_default = value is None and defaults[name] is None
                parsed[name] = None if is_default else convert(name, value)
        # The backend checks the names.
        from_environment = os.environ.get(DISABLE_ENVIRONMENT, "").replace(",", " ").split()
        parsed["disable_passes"] = (*parsed.get("disable_passes", ()), *from_environment)
        compiler = parsed.get("compiler", "inductor")
        if parsed.get("mode") is not None and compiler != "inductor":
            raise OptionError(
                f"mode={parsed['mode']!r} is for inductor; compiler={compiler!r} has no modes"
            )
        if given:
            _check_inductor_options(given, compiler)
        if parsed.get("numerics") == "eager":
            _add_implied(parsed)
        return cls(**parsed, inductor=tuple(given.items()))

    @property
    def compiler_name(self) -> str:
        """Name of the compiler for messages."""
        if isinstance(self.compiler, str):
            return self.compiler
        return getattr(self.compiler, "__name__", type(self.compiler).__name__)

    @property
    def uses_aot_autograd(self) -> bool:
        """True if amp_fx passes graphs to AOTAutograd, which lets it cache casts of weights."""
        return self.compiler in ("inductor", "aot_eager")

    @property
    def has_wide_weight_grads(self) -> bool:
        """True if products of gradients of weights give float32."""
        if self.weight_grads is None:
            return any(has_low_sums(table) for table in self.policy.tables.values())
        return self.weight_grads == "float32"

    @property
    def has_eager_kernels(self) -> bool:
        """True if ops run in ATen's kernels where generated code gives other bits."""
        return self.numerics == "eager"


def to_dtype(name: str, value: object) -> torch.dtype:
    """Converts the value of an option to a dtype.

    Raises:
        OptionError: The value is neither a dtype nor the name of one.
    """
    dtype = as_dtype(value)
    if dtype is None:
        raise OptionError(
            f"{name}={value!r} is not a dtype: pass torch.bfloat16, torch.float16 or a name of one"
        )
    return dtype


def _to_low_dtype(name: str, value: Any) -> torch.dtype:
    dtype = to_dtype(name, value)
    if not is_low(dtype):
        raise OptionError(
            f"{name}={value!r} is not a dtype to autocast to: pass torch.bfloat16 or torch.float16"
        )
    return dtype


def _to_policy(name: str, value: Any) -> Policy:
    if isinstance(value, (str, os.PathLike, Policy)):
        return as_policy(value)
    raise OptionError(
        f"{name}={value!r} is not an amp_fx.Policy, the name of a preset, or the path "
        "of a policy file"
    )


def _to_verify(name: str, value: Any) -> str:
    if isinstance(value, bool):
        value = "full" if value else "off"
    return _to_choice(name, value)


_CHOICES = {
    "output_dtype": OUTPUT_DTYPES,
    "verify": VERIFY,
    "weight_grads": WEIGHT_GRADS,
    "numerics": NUMERICS,
}


def _to_compiler(name: str, value: Any) -> str | Callable[..., Any]:
    if callable(value):
        return value  # type: ignore[no-any-return]
    if not isinstance(value, str) or value not in COMPILERS:
        allowed = ", ".join(map(repr, COMPILERS))
        raise OptionError(f"{name}={value!r} is not one of {allowed}, or a backend of Dynamo")
    return value


def _to_choice(name: str, value: Any, allowed: Sequence[str] = ()) -> str:
    allowed = allowed or _CHOICES[name]
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


def as_low_dtype(value: Any) -> torch.dtype:
    """Returns the low-precision dtype that a value means.

    Raises:
        OptionError: The value is not a dtype to autocast to, such as float32.
    """
    return _to_low_dtype("dtype", value)


def as_output_dtype(value: Any) -> str:
    """The option ``output_dtype``, checked.

    Raises:
        OptionError: It is not one of ``OUTPUT_DTYPES``.
    """
    return _to_choice("output_dtype", value)


def _to_mode(name: str, value: Any) -> str:
    from amp_fx.torch_private.inductor_config import list_mode_options

    return _to_choice(name, value, tuple(list_mode_options()))


def _to_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is neither True nor False")
    return value


def _to_weight_cache(name: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "training":
        raise OptionError(f"{name}={value!r} is not one of True, False, 'training'")
    return value  # type: ignore[no-any-return]


def _to_passes(name: str, value: Any) -> tuple[Pass, ...]:
    if not isinstance(value, (list, tuple)):
        raise OptionError(f"{name}={value!r} is not a list of passes")
    for each in value:
        check_pass(name, each)
    return tuple(value)


def _to_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise OptionError(f"{name}={value!r} is not a list of names of passes")


_IMPLIED = {"range_guard": False, "weight_grads": "autocast", "fold_batch_norm": False}
"""Values of other options without which ``numerics="eager"`` would not have eager code's bits."""


def _add_implied(parsed: dict[str, Any]) -> None:
    for name, value in _IMPLIED.items():
        if parsed.get(name) is None:
            parsed[name] = value
        if parsed[name] != value:
            raise OptionError(
                f"{name}={parsed[name]!r} changes numbers, which numerics='eager' does not allow"
            )


DISABLE_ENVIRONMENT = "AMP_FX_DISABLE_PASSES"


_CONVERT = {
    "dtype": _to_low_dtype,
    "policy": _to_policy,
    "compiler": _to_compiler,
    "output_dtype": _to_choice,
    "weight_cache": _to_weight_cache,
    "verify": _to_verify,
    "freezing": _to_bool,
    "fold_batch_norm": _to_bool,
    "weight_grads": _to_choice,
    "numerics": _to_choice,
    "range_guard": _to_bool,
    "narrow_gathers": _to_bool,
    "bare_region": _to_bool,
    "fallback": _to_bool,
    "passes": _to_passes,
    "disable_passes": _to_names,
    "mode": _to_mode,
}


NAMES = (*_CONVERT,)
"""Names of the options that are not inductor's."""


def _check_inductor_options(options: Mapping[str, Any], compiler: str) -> None:
    from amp_fx.torch_private.inductor_config import config

    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            raise OptionError(f"unknown option {name!r}{_suggestion(name, known)}")
        if compiler != "inductor":
            raise OptionError(
                f"the option {name!r} is inductor's, and compiler={compiler!r} does not take it"
            )
    from amp_fx.torch_private.inductor_config import TorchCompileInductorWrapper

    try:
        TorchCompileInductorWrapper(None, dict(options), None)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise OptionError(str(error)) from error


def _suggestion(name: str, inductor: Iterable[str]) -> str:
    """Ends the message about an unknown option."""
    meant = did_you_mean(name, _CONVERT) or did_you_mean(name, inductor)
    lists = "amp_fx.options.Options lists amp_fx's, torch._inductor.list_options() inductor's"
    return meant or f"; {lists}"


def check_device_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Refuses a dtype that a device type cannot autocast to.

    Raises:
        OptionError: Names what the device takes.
    """
    allowed = supported_dtypes(device_type)
    if dtype not in allowed:
        raise OptionError(
            f"dtype={dtype} cannot be autocast to on {device_type!r}; "
            f"allowed: {', '.join(map(str, allowed))}"
        )


def default_dtype(
    device_type: str, indices: Iterable[int] = (), *, warns: bool = False
) -> torch.dtype:
    """The dtype of a region that names none.

    On CUDA and XPU, where autocast's default is float16, it is bfloat16, which needs no loss
    scale, if every device has units for it. Elsewhere, and where ``torch.set_autocast_dtype`` was
    told otherwise, it is autocast's if the device takes it, else the first that it takes.

    Args:
        device_type: As in ``torch.device(...).type``; it need not be there.
        indices: Of the devices that are meant; all of this machine if none is given.
        warns: Whether to warn, once, if float16 is used without being requested.
    """
    dtype = torch.get_autocast_dtype(device_type)
    supported = supported_dtypes(device_type)
    if dtype not in supported and supported:
        dtype = supported[0]
    lacking = without_bfloat16(device_type, indices)
    if device_type in DIFFERING and dtype is torch.float16 and not lacking:
        return torch.bfloat16
    if warns and dtype is torch.float16 and device_type != "cpu":
        warn_of_default(device_type, lacking)
    return dtype


# What Dynamo compiles may call a compiled module, and so come here. For the mark see ``region``.
default_dtype._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_units(device_type: str, indices: Iterable[int], dtype: torch.dtype) -> None:
    """Refuses bfloat16 for devices without the units, of which inductor makes no kernels.

    Raises:
        OptionError: Names the devices, and the dtype that they have units for.
    """
    lacking = without_bfloat16(device_type, indices)
    if dtype is torch.bfloat16 and lacking:
        raise OptionError(
            f"dtype={dtype}: {device_names(device_type, lacking)} has no bfloat16 units, and "
            "inductor makes no kernels with bfloat16 for it; give torch.float16, and train with "
            "amp_fx.GradScaler"
        )


def warn_of_units(device_type: str, indices: Iterable[int], dtype: torch.dtype) -> None:
    """Warns once of bfloat16 on devices without the units."""
    lacking = without_bfloat16(device_type, indices)
    if dtype is torch.bfloat16 and lacking:
        warn_of_emulation(device_type, lacking)


def supported_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Dtypes that ``torch.autocast`` of a device type accepts, low ones.

    A PrivateUse1 backend says it itself, through ``get_amp_supported_dtype``.
    """
    if device_type == privateuse1_name():
        module = getattr(torch, device_type, None)
        supported = getattr(module, "get_amp_supported_dtype", None)
        if supported is not None:
            return tuple(supported())
    return (torch.bfloat16, torch.float16)
