"""Finding the op that somebody means among those that the installed torch has."""

from __future__ import annotations

import pytest
import torch

from amp_fx.errors import PolicyError
from amp_fx.tables.op_names import (
    all_ops,
    find_overloads,
    is_functional,
    op_text,
    ops,
    overloads_by_packet,
)


@pytest.mark.parametrize(
    "text",
    [
        "softmax",
        "softmax.int",
        "aten::softmax",
        "aten::softmax.int",
        "aten.softmax.int",
        "torch.ops.aten.softmax.int",
        "torch.softmax",
        "torch.nn.functional.softmax",
        "F.softmax",
    ],
)
def test_many_spellings_of_one_op(text: str) -> None:
    assert "aten::softmax.int" in find_overloads(text)


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("torch.ops.aten.linear.default", "aten::linear"),
        ("torch.linalg.solve", "aten::linalg_solve"),
        ("torch.fft.rfft", "aten::fft_rfft"),
        ("torch.special.expit", "aten::special_expit"),
        ("torch.nn.functional.cross_entropy", "aten::cross_entropy_loss"),
    ],
)
def test_public_functions_and_default_overloads(text: str, op: str) -> None:
    assert find_overloads(text) == (op,)


def test_a_packet_stands_for_its_functional_overloads() -> None:
    assert find_overloads("quantile") == ("aten::quantile", "aten::quantile.scalar")
    assert find_overloads("quantile.out") == ("aten::quantile.out",)
    assert find_overloads("relu_") == ("aten::relu_",)


def test_a_typing_error_gets_near_names() -> None:
    with pytest.raises(PolicyError, match=r"no op 'sofmax'; similar names: .*aten::softmax"):
        find_overloads("sofmax")
    with pytest.raises(PolicyError, match=r"similar names: .*aten::softmax\.int"):
        find_overloads("softmax.integer")


def test_names_from_elsewhere_are_found_too() -> None:
    assert find_overloads("matrix_rank", also=["aten::matrix_rank"]) == ("aten::matrix_rank",)


def test_torch_lists_ops_by_qualified_overload_name() -> None:
    with torch.library._scoped_library("amp_fx_test_names", "DEF") as library:
        library.define("f.twice(Tensor x) -> Tensor")
        assert "amp_fx_test_names::f.twice" in all_ops()
        assert overloads_by_packet()["amp_fx_test_names::f"] == ["amp_fx_test_names::f.twice"]
    assert "amp_fx_test_names::f.twice" not in all_ops()


def test_a_schema_says_what_an_op_writes_to() -> None:
    assert is_functional("aten::add.Tensor")
    assert is_functional("aten::view_as_complex")
    assert not is_functional("aten::add_.Tensor")
    assert not is_functional("aten::add.out")


def test_ops_themselves_are_names_too() -> None:
    custom = torch.library.custom_op(
        "amp_fx_test::named", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert op_text(torch.ops.aten.softmax) == "aten::softmax"
    assert op_text(torch.ops.aten.softmax.int) == "aten::softmax.int"
    assert op_text(torch.ops.aten.bmm.default) == "aten::bmm.default"
    assert op_text(custom) == "amp_fx_test::named"
    for wrong in (torch.softmax, None, 3, " "):
        with pytest.raises(PolicyError, match="is not an op or the name of one"):
            op_text(wrong)


def test_names_without_a_namespace_are_atens() -> None:
    assert ops("exp\n conv2d.padding mylib::f") == ("aten::exp", "aten::conv2d.padding", "mylib::f")
