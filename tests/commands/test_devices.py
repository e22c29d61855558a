"""What users are told of devices: only those that tensors can be on."""

from __future__ import annotations

import pytest
import torch

from amp_fx.bench import __main__ as bench
from amp_fx.commands import demo
from amp_fx.errors import OptionError


@pytest.mark.parametrize("command", [demo, bench])
def test_device_types_that_carry_policies_are_not_offered(
    command: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # as if the device were there
    with pytest.raises(OptionError, match="cpu") as caught:
        command.parse_device("vulkan")  # type: ignore[attr-defined]
    assert "'ipu'" not in str(caught.value)
