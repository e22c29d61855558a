"""The device under test, and ways to call functions on it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import UnsupportedError, first_line
from amp_fx.regions.state import no_autocast
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.torch_private.pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.tables.cast_policy import Table

Comparison: TypeAlias = tuple[str, str, str, str]
"""An op or a few words on a program, the expected result, the result, and how to mend it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, the dtype of its regions, and the table that its autocast must follow.

    Attributes:
        device_type: The device type.
        dtype: The dtype of the regions.
        table: The cast policies by op.
        other_dtypes: Other dtypes that regions may have.
    """

    device_type: str
    dtype: torch.dtype
    table: Table
    other_dtypes: tuple[torch.dtype, ...] = ()

    def region(self, **settings: Any) -> torch.autocast:
        """Returns a region of ``torch.autocast``."""
        return torch.autocast(self.device_type, **{"dtype": self.dtype, **settings})

    def product_dtype(self, low_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of ``torch.mm`` of float32 matrices in a region."""
        is_low = self.table.get("aten::mm") is CastPolicy.LOWER_PRECISION_FP
        return low_dtype if is_low else torch.float32

    @functools.cached_property
    def ineligible_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that autocast never casts and that the device supports, of float64 and int64."""
        return tuple(filter(self._has, (torch.float64, torch.int64)))

    def _has(self, dtype: torch.dtype) -> bool:
        try:
            self.tensors(torch.zeros(1, dtype=dtype))
        except Exception as error:  # noqa: BLE001, many chips have no float64
            self.failure(error)
            return False
        return True

    def tensors(self, tree: Any) -> Any:
        """Copies the tensors of a tree to the device."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device_type), tree)

    def compare(
        self, op: str, expected: object, got: Callable[[], object], mend: str
    ) -> Comparison:
        """Compares a result with the expected one.

        Args:
            op: The op, or a few words on the program.
            expected: Its result on a device that conforms.
            got: Computes its result on this device. An exception is a result as well.
            mend: The change to make if the two differ.
        """
        try:
            result = text(got())
        except Exception as error:  # noqa: BLE001, the report shows it
            result = self.failure(error)
        return op, text(expected), result, mend

    def failure(self, error: Exception) -> str:
        """Returns the type and the message of an exception of a call.

        Raises:
            UnsupportedError: The device is out of memory, or does not work any more.
        """
        message = first_line(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise UnsupportedError(
                f"{self.device_type} is out of memory: free some and start again ({message})"
            ) from error
        self.check_alive(f"{self.device_type} stopped working: free or reset it and start again")
        return message

    def check_alive(self, problem: str) -> None:
        """Raises an error unless the device can add two numbers.

        Raises:
            UnsupportedError: It cannot; the message begins with ``problem``.
        """
        try:
            with no_autocast():
                one = torch.ones(1, dtype=torch.float32).to(self.device_type)
                is_alive = (one + one).cpu().item() == 2.0
        except Exception as error:
            raise UnsupportedError(f"{problem} ({first_line(error)})") from error
        if not is_alive:
            raise UnsupportedError(f"{problem} (1 + 1 is not 2)")


def text(value: object) -> str:
    """Returns a value in the words of the report."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    return str(value)


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Returns True if ``torch.autocast`` can be enabled for a dtype, which otherwise warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(device_type, dtype):
                return torch.is_autocast_enabled(device_type)
        except RuntimeError:
            return False
