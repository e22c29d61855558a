"""Pickles by versions whose modules had other names still load."""

from __future__ import annotations

import base64
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import CastPolicy, Policy
from amp_fx.front.settings import RegionSettings

# As the version before the modules moved has pickled them.
CAST_POLICY = "gAJjYW1wX2Z4LnBvbGljaWVzLmNhc3RfcG9saWN5CkNhc3RQb2xpY3kKcQBYBAAAAGZwMzJxAYVxAlJxAy4="
POLICY = (
    "gAJjYW1wX2Z4LnBvbGljaWVzLnBvbGljeQpfcmVzdG9yZWQKcQBLAX1xAShYBAAAAG5hbWVxAlgEAAAAbWluZXEDWA"
    "YAAAB0YWJsZXNxBH1xBVgDAAAAY3B1cQZ9cQcoWAwAAABhdGVuOjpsaW5lYXJxCGNhbXBfZngucG9saWNpZXMuY2Fz"
    "dF9wb2xpY3kKQ2FzdFBvbGljeQpxCVgSAAAAbG93ZXJfcHJlY2lzaW9uX2ZwcQqFcQtScQxYEQAAAGF0ZW46OnNvZn"
    "RtYXguaW50cQ1oDHVzWAMAAABvcHNxDmNhbXBfZngucG9saWNpZXMub3ZlcnJpZGVzCk9wT3ZlcnJpZGUKcQ8pgXEQ"
    "fXERKFgHAAAAcGF0dGVybnESWAcAAABzb2Z0bWF4cRNYBgAAAHBvbGljeXEUaAxYCQAAAG92ZXJsb2Fkc3EVWBEAAA"
    "BhdGVuOjpzb2Z0bWF4LmludHEWhXEXdWKFcRhYBwAAAG1vZHVsZXNxGWNhbXBfZngucG9saWNpZXMub3ZlcnJpZGVz"
    "Ck1vZHVsZU92ZXJyaWRlCnEaKYFxG31xHChoElgDAAAAYS4qcR1oFGgJWAQAAABmcDMycR6FcR9ScSB1YmgaKYFxIX"
    "1xIihoEmN0b3JjaC5ubi5tb2R1bGVzLm5vcm1hbGl6YXRpb24KTGF5ZXJOb3JtCnEjaBRoCVgEAAAAa2VlcHEkhXEl"
    "UnEmdWJoGimBcSd9cSgoaBJjcmUKX2NvbXBpbGUKcSlYAgAAAHgrcSpLIIZxK1JxLGgUaAlYBwAAAHByb21vdGVxLY"
    "VxLlJxL3Vih3EwWAQAAABhcmdzcTFjYW1wX2Z4LnBvbGljaWVzLm92ZXJyaWRlcwpBcmdPdmVycmlkZQpxMimBcTN9"
    "cTQoaBJYCQAAAGluZGV4X2FkZHE1aDFYBgAAAHNvdXJjZXE2WAwAAABzYW1lX2FzOnNlbGZxN4ZxOIVxOWgVWA8AAA"
    "BhdGVuOjppbmRleF9hZGRxOoVxO3VihXE8WAUAAABydWxlc3E9Y2FtcF9meC5wb2xpY2llcy5vdmVycmlkZXMKUnVs"
    "ZU92ZXJyaWRlCnE+KYFxP31xQFgIAAAAZnVuY3Rpb25xQWNfb3BlcmF0b3IKYWRkCnFCc2KFcUNYBgAAAGR0eXBlc3"
    "FEKXWGcUVScUYu"
)
SETTINGS = (
    "gAJjYW1wX2Z4LmZyb250LmNvbXBpbGVkClJlZ2lvblNldHRpbmdzCnEAKYFxAX1xAihYCwAAAGRldmljZV90eXBlcQ"
    "NYAwAAAGNwdXEEWAUAAABkdHlwZXEFY3RvcmNoCmJmbG9hdDE2CnEGWAYAAABwb2xpY3lxB2NhbXBfZngucG9saWNp"
    "ZXMucG9saWN5Cl9yZXN0b3JlZApxCEsBfXEJKFgEAAAAbmFtZXEKWAEAAABxcQtYBgAAAHRhYmxlc3EMfXENaAR9cQ"
    "5YCAAAAGF0ZW46Om1tcQ9jYW1wX2Z4LnBvbGljaWVzLmNhc3RfcG9saWN5CkNhc3RQb2xpY3kKcRBYBAAAAGtlZXBx"
    "EYVxElJxE3NzWAMAAABvcHNxFClYBwAAAG1vZHVsZXNxFSlYBAAAAGFyZ3NxFilYBQAAAHJ1bGVzcRcpWAYAAABkdH"
    "lwZXNxGCl1hnEZUnEadWIu"
)
SCALER = (
    "gAJjYW1wX2Z4LmdyYWRfc2NhbGVyLnNjYWxlcgpHcmFkU2NhbGVyCnEAKYFxAX1xAihYBwAAAF9kZXZpY2VxA1gDAAAA"
    "Y3B1cQRYCAAAAF9lbmFibGVkcQWIWAsAAABfaW5pdF9zY2FsZXEGR0AgAAAAAAAAWAYAAABfc2NhbGVxB05YDgAAAF9n"
    "cm93dGhfZmFjdG9ycQhHQAAAAAAAAABYDwAAAF9iYWNrb2ZmX2ZhY3RvcnEJRz/gAAAAAAAAWBAAAABfZ3Jvd3RoX2lu"
    "dGVydmFscQpLAVgUAAAAX2luaXRfZ3Jvd3RoX3RyYWNrZXJxC0sAWA8AAABfZ3Jvd3RoX3RyYWNrZXJxDE5YFQAAAF9w"
    "ZXJfb3B0aW1pemVyX3N0YXRlc3ENY2NvbGxlY3Rpb25zCmRlZmF1bHRkaWN0CnEOY3RvcmNoLmFtcC5ncmFkX3NjYWxl"
    "cgpfcmVmcmVzaF9wZXJfb3B0aW1pemVyX3N0YXRlCnEPhXEQUnERWAsAAABfYWxsb3dfZnAxNnESiVgHAAAAX2xpbWl0"
    "c3ETY2FtcF9meC5ncmFkX3NjYWxlci5saW1pdHMKTGltaXRzCnEUKYFxFX1xFihYCgAAAF9taW5fc2NhbGVxF0c78AAA"
    "AAAAAFgKAAAAX21heF9zY2FsZXEYR0AwAAAAAAAAWAsAAABfaHlzdGVyZXNpc3EZSwNYBQAAAGZsb29ycRpHO/AAAAAA"
    "AABYCAAAAF9jZWlsaW5ncRtHQDAAAAAAAABYDgAAAF9udW1fb3ZlcmZsb3dzcRxLAnViWAwAAABfb25fY29sbGFwc2Vx"
    "HVgEAAAAd2FybnEeWAoAAABfYWdyZWVtZW50cR9jYW1wX2Z4LmdyYWRfc2NhbGVyLmFncmVlbWVudApBZ3JlZW1lbnQK"
    "cSApUnEhWA0AAABfaGlzdG9yeV9zaXplcSJLZFgTAAAAX2lzX3VwZGF0ZWRfYnlfc3RlcHEjiXViLg=="
)
"""Of scale 8, hysteresis 3 and ceiling 16, that grows at each update, after two overflows."""
LATER_SCALER = (
    "gAJjYW1wX2Z4LmdyYWRfc2NhbGVyLnNjYWxlcgpHcmFkU2NhbGVyCnEAKYFxAX1xAihYBwAAAF9kZXZpY2VxA1gDAAAA"
    "Y3B1cQRYCAAAAF9lbmFibGVkcQWIWAsAAABfaW5pdF9zY2FsZXEGR0AgAAAAAAAAWAYAAABfc2NhbGVxB05YDgAAAF9n"
    "cm93dGhfZmFjdG9ycQhHQAAAAAAAAABYDwAAAF9iYWNrb2ZmX2ZhY3RvcnEJRz/gAAAAAAAAWBAAAABfZ3Jvd3RoX2lu"
    "dGVydmFscQpLAVgUAAAAX2luaXRfZ3Jvd3RoX3RyYWNrZXJxC0sAWA8AAABfZ3Jvd3RoX3RyYWNrZXJxDE5YFQAAAF9w"
    "ZXJfb3B0aW1pemVyX3N0YXRlc3ENY2NvbGxlY3Rpb25zCmRlZmF1bHRkaWN0CnEOY3RvcmNoLmFtcC5ncmFkX3NjYWxl"
    "cgpfcmVmcmVzaF9wZXJfb3B0aW1pemVyX3N0YXRlCnEPhXEQUnERWAsAAABfYWxsb3dfZnAxNnESiFgHAAAAX2xpbWl0"
    "c3ETY2FtcF9meC5ncmFkX3NjYWxlci5sb3NzX3NjYWxlCkxpbWl0cwpxFCmBcRV9cRYoWAkAAABtaW5fc2NhbGVxF0dA"
    "AAAAAAAAAFgJAAAAbWF4X3NjYWxlcRhHQDAAAAAAAABYCgAAAGh5c3RlcmVzaXNxGUsDWAUAAABmbG9vcnEaR0AAAAAA"
    "AAAAWAcAAABjZWlsaW5ncRtHQDAAAAAAAAB1YlgOAAAAX251bV9vdmVyZmxvd3NxHEsCWAwAAABfb25fY29sbGFwc2Vx"
    "HVgEAAAAd2FybnEeWAoAAABfYWdyZWVtZW50cR9jYW1wX2Z4LmdyYWRfc2NhbGVyLnByb2Nlc3NlcwpBZ3JlZW1lbnQK"
    "cSApUnEhWA0AAABfaGlzdG9yeV9zaXplcSJLZFgTAAAAX2lzX3VwZGF0ZWRfYnlfc3RlcHEjiXViLg=="
)
"""The same from version 0.2.0."""


def policy() -> Policy:
    table = {"aten::linear": CastPolicy.LOWER_PRECISION_FP, "aten::softmax.int": CastPolicy.FP32}
    return (
        Policy("mine", {"cpu": table})
        .with_ops({"softmax": "lower_precision_fp"})
        .with_modules({"a.*": "fp32", nn.LayerNorm: "keep", "re:x+": "promote"})
        .with_args("index_add", {"source": "same_as:self"})
        .with_rule("operator:add")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CAST_POLICY, CastPolicy.FP32),
        (POLICY, policy()),
        (
            SETTINGS,
            RegionSettings(
                "cpu", torch.bfloat16, Policy("q", {"cpu": {"aten::mm": CastPolicy.KEEP}})
            ),
        ),
    ],
)
def test_old_pickles_load(text: str, expected: object) -> None:
    assert pickle.loads(base64.b64decode(text)) == expected


def test_a_compiled_module_of_old_loads() -> None:
    """Its class and its settings by the names that their modules had."""
    net = amp_fx.compile(nn.Linear(2, 2), options={"compiler": "eager"})
    new = pickle.dumps(net, protocol=0)
    old = new.replace(b"amp_fx.front.settings", b"amp_fx.front.compiled")
    assert new != old
    assert pickle.loads(old)(torch.ones(1, 2)).dtype == torch.bfloat16


def test_the_region_of_old_loads() -> None:
    """A function is pickled by the name of its module."""
    new = pickle.dumps(amp_fx.autocast, protocol=0)
    old = new.replace(b"amp_fx.eager.region", b"amp_fx.regions.region")
    assert new != old
    assert pickle.loads(old) is amp_fx.autocast


@pytest.mark.parametrize("text", [SCALER, LATER_SCALER], ids=["0.1.0", "0.2.0"])
def test_a_scaler_of_old_goes_on(text: str) -> None:
    """Limits and agreement by the names that their modules had, and the row of overflows."""
    scaler = pickle.loads(base64.b64decode(text))
    scaler = pickle.loads(pickle.dumps(scaler))
    assert scaler.get_scale() == 8.0
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for grad, expected in ((math.inf, 4.0), (1.0, 8.0), (1.0, 16.0), (1.0, 16.0)):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((3,), grad)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected


def test_nothing_of_ours_need_be_imported_before() -> None:
    code = f"import base64, pickle; print(pickle.loads(base64.b64decode({CAST_POLICY!r})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "CastPolicy.FP32"
