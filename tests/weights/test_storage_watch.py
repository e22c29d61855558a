"""What the watch relies on: torch's private copy-on-write functions, one by one."""

from __future__ import annotations

import copy
import gc
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from amp_fx.tables.presets import torch_version
from amp_fx.weights.kept_copies import same_bits
from amp_fx.weights.python_watch import _is_in_use as _is_shared
from amp_fx.weights.storage_watch import StorageWatch, arm, is_armed, storage_address_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 4))


def test_a_fresh_storage_is_not_armed() -> None:
    assert not is_armed(weight())


def test_lazy_clone_arms_and_moves_nothing() -> None:
    p = weight()
    address = p.data_ptr()
    clone = torch._lazy_clone(p.detach())
    assert is_armed(p)
    del clone
    assert is_armed(p)
    assert storage_address_of(p) == address
    assert is_armed(p)


def test_lazy_clone_leaves_version_and_storage_alone() -> None:
    p = weight()
    storage, version = p.untyped_storage()._cdata, p._version
    assert arm(p)
    assert (p.untyped_storage()._cdata, p._version) == (storage, version)


def test_a_write_after_arming_stays_where_it_was() -> None:
    """The only clone is dead, so that a write need not copy."""
    p = weight()
    address = p.data_ptr()
    arm(p)
    p.data.mul_(2)
    assert p.data_ptr() == address
    assert not is_armed(p)


def test_views_share_the_state_of_their_storage() -> None:
    flat = torch.ones(8)
    left, right = flat[:4], flat[4:]
    arm(left)
    assert is_armed(right)
    right.mul_(2)
    assert not is_armed(left)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, 4), p),
    "matmul": lambda p: p @ p,
    "to": lambda p: p.to(torch.bfloat16),
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.detach().clone(),
    "deepcopy": copy.deepcopy,
    "equal": lambda p: torch.equal(p, p),
    "print": repr,
    "tolist": lambda p: p.tolist(),
    "address": storage_address_of,
    "view": lambda p: p.view(-1)[3:],
    "foreach_copy_source": lambda p: torch._foreach_copy_(
        [torch.empty(4, 4, dtype=torch.bfloat16)], [p.detach()]
    ),
}


@pytest.mark.parametrize("read", READS)
def test_reads_leave_it_armed(read: str) -> None:
    p = weight()
    arm(p)
    READS[read](p)
    assert is_armed(p)


def test_asking_for_a_pointer_is_taken_for_a_write() -> None:
    p = weight()
    for ask in (p.data_ptr, lambda: p.detach().numpy(), p.untyped_storage().data_ptr):
        assert arm(p)
        ask()
        assert not is_armed(p)


def test_storages_that_torch_did_not_allocate_cannot_be_armed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    torch.save({"weight": torch.ones(4, 4)}, path)
    file = tmp_path / "raw"
    file.write_bytes(bytes(64))
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 64)
    foreign = {
        "numpy": torch.from_numpy(np.ones((4, 4), dtype=np.float32)),
        "torch.load(mmap)": torch.load(path, mmap=True)["weight"],
        "from_file": torch.from_file(str(file), shared=True, size=16),
        "mmap": torch.frombuffer(mapped, dtype=torch.float32),
        "shared memory": torch.ones(4, 4).share_memory_(),  # type: ignore[no-untyped-call]
        "dlpack of NumPy": from_dlpack(np.ones((4, 4), dtype=np.float32)),
    }
    for name, tensor in foreign.items():
        assert not arm(tensor), name
        assert StorageWatch().generation(tensor) is None, name
        assert tensor.sum().item() in (0, 16)


def test_an_armed_storage_can_be_shared_saved_and_pickled(tmp_path: Path) -> None:
    p = weight()
    arm(p)
    torch.save(p, tmp_path / "p")
    assert torch.equal(torch.load(tmp_path / "p"), p)
    arm(p)
    p.share_memory_()  # type: ignore[no-untyped-call]
    assert p.is_shared()  # type: ignore[no-untyped-call]
    p.data.mul_(2)
    assert p.sum().item() == 32


@pytest.mark.xfail(
    torch_version() >= (2, 13),
    strict=True,
    raises=RuntimeError,
    reason="torch: resizing a storage leaves its copy-on-write materializer behind",
)
def test_an_armed_storage_can_be_resized() -> None:
    """Sharded training frees and allocates storages: such weights must not be armed."""
    p = weight()
    arm(p)
    p.untyped_storage().resize_(0)
    p.untyped_storage().resize_(64)
    p.data.fill_(1)


def test_generation_is_equal_as_long_as_nothing_is_written() -> None:
    watch, p = StorageWatch(), weight()
    first = watch.generation(p)
    assert watch.generation(p) == first
    p.data.mul_(2)
    second = watch.generation(p)
    assert second != first
    assert watch.generation(p) == second


def test_generation_belongs_to_the_storage() -> None:
    watch, flat = StorageWatch(), torch.ones(8)
    first = watch.generation(flat[:4])
    assert watch.generation(flat[4:]) == first
    flat[4:].mul_(2)
    assert watch.generation(flat[4:]) != first
    assert watch.generation(flat[:4]) != first


def test_generations_of_storages_differ() -> None:
    watch = StorageWatch()
    weights = [weight() for _ in range(5)]
    assert len({watch.generation(p) for p in weights}) == 5


def test_dead_storages_are_forgotten_and_their_numbers_not_used_again() -> None:
    watch = StorageWatch()
    seen = set()
    for _ in range(300):
        p = weight()
        seen.add(watch.generation(p))
        del p
        gc.collect(0)
    assert len(seen) == 300
    assert len(watch._records) <= 256


def test_use_count_tells_whether_a_backward_holds_a_copy() -> None:
    copy_ = torch.ones(4, 4, dtype=torch.bfloat16)
    assert not _is_shared(copy_)
    view = copy_.view_as(copy_)
    assert _is_shared(copy_)
    del view
    assert not _is_shared(copy_)


@pytest.mark.parametrize(
    "is_view",
    [True, False],
)
def test_use_count_sees_saved_tensors(is_view: bool) -> None:
    """An op saves its inputs as they are: no second tensor over the storage need exist."""
    copy_ = torch.ones(4, 4, dtype=torch.bfloat16)
    x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    used = copy_.view_as(copy_) if is_view else copy_
    out = x @ used
    del used
    assert _is_shared(copy_)
    del out
    assert not _is_shared(copy_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_bits_tells_zeros_apart_and_not_nans(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, float("nan"), 1.0], dtype=dtype)
    assert same_bits(values, values.clone())
    assert not same_bits(values, torch.tensor([-0.0, float("nan"), 1.0], dtype=dtype))


def test_same_bits_takes_every_shape_and_dtype_that_a_cast_can_have() -> None:
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    strided = torch.ones(4, 6)[:, ::2]
    assert same_bits(strided, strided)
    assert same_bits(strided.t(), strided.t())
