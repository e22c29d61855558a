"""Passes that users add to the pipeline, and passes that they disable."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle

from amp_fx.backend.pipeline import AOT_PASSES, BUILT_IN
from amp_fx.errors import OptionError, did_you_mean
from amp_fx.options import DISABLE_ENVIRONMENT
from amp_fx.passes.base import check_pass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.options import Options
    from amp_fx.passes.base import Pass

DEFAULT_AFTER = "fold_casts"


@dataclasses.dataclass(frozen=True)
class AddedPass:
    """A pass that a user added, and the name of the pass before it."""

    added: Pass
    after: str = DEFAULT_AFTER


_registered: OrderedDict[str, AddedPass] = OrderedDict()


def register_pass(new: Pass, *, after: str = DEFAULT_AFTER) -> RemovableHandle:
    """Runs a pass over every graph that is compiled or explained from now on.

    Args:
        new: The pass (``amp_fx.passes.base.Pass``). It replaces a registered pass of the same name.
        after: The name of the pass to run after. In graphs where that pass does not run, the new
            pass runs at its position. The new pass gets graphs of the kind that this pass gets:
            captured graphs, or graphs of AOTAutograd.

    Returns:
        A handle; its ``remove()`` unregisters the pass.

    Raises:
        OptionError: ``new`` is not a pass or has the name of a built-in one, or no pass is called
            ``after``.
    """
    check_pass("register_pass", new)
    _check_name("register_pass", new)
    if after not in BUILT_IN and after not in _registered:
        raise OptionError(f"after={after!r}: {_no_such_pass(after, ())}")
    handle = RemovableHandle(_registered)
    handle.id = new.name  # type: ignore[assignment]
    _registered[new.name] = AddedPass(new, after)
    return handle


def check_passes(options: Options) -> None:
    """Checks the user's passes and the names of disabled passes.

    Raises:
        OptionError: A user's pass has the name of a built-in one, there is no pass of a disabled
            name, or results depend on a disabled pass.
    """
    for each in options.passes:
        _check_name("passes", each)
    for name in options.disable_passes:
        where = f"disable_passes or {DISABLE_ENVIRONMENT}"
        if name not in (*BUILT_IN, *_registered, *_names(options.passes)):
            raise OptionError(f"{where}: {_no_such_pass(name, options.passes)}")
        if getattr(BUILT_IN.get(name), "is_needed", False):
            raise OptionError(f"{where}: results would be wrong without the pass {name!r}")


def _check_name(where: str, new: Pass) -> None:
    if new.name in BUILT_IN:
        raise OptionError(
            f"{where}: {new.name!r} is the name of a pass of amp_fx; give another one"
        )


def _names(passes: Iterable[Pass]) -> list[str]:
    return [each.name for each in passes]


def _no_such_pass(name: str, added: Sequence[Pass]) -> str:
    known = [*BUILT_IN, *_registered, *_names(added)]
    meant = did_you_mean(name, known)
    return f"there is no pass {name!r}{meant}; the passes are {', '.join(known)}"


def with_added(
    passes: Iterable[Pass], added: Sequence[Pass], disabled: Iterable[str], *, is_aot: bool = False
) -> tuple[Pass, ...]:
    """Inserts registered and added passes, and removes disabled ones.

    Args:
        passes: The built-in passes.
        added: Passes from the options.
        disabled: Names of passes that do not run.
        is_aot: Whether the passes run on a graph of AOTAutograd.
    """
    pipeline = list(passes)
    inserted: set[str] = set()
    # Registered passes first: one of the options may be added after a registered one.
    for entry in [*_registered.values(), *map(AddedPass, added)]:
        if _is_aot(entry) != is_aot:
            continue
        position = _position(pipeline, entry.after)
        while position < len(pipeline) and pipeline[position].name in inserted:
            position += 1  # passes that were added earlier run earlier
        pipeline.insert(position, entry.added)
        inserted.add(entry.added.name)
    return tuple(each for each in pipeline if each.name not in disabled)


def _is_aot(entry: AddedPass) -> bool:
    """Returns True if a pass runs on graphs of AOTAutograd, after a pass that does."""
    seen: set[str] = set()
    # Passes that were registered again may follow one another in a circle.
    while entry.after in _registered and entry.after not in seen:
        seen.add(entry.after)
        entry = _registered[entry.after]
    return any(entry.after == kind.name for kind in AOT_PASSES)


def _position(passes: Sequence[Pass], after: str) -> int:
    """Returns the position after a pass, or the position that the pass would have."""
    names = _names(passes)
    if after in names:
        return names.index(after) + 1
    ranks = {name: rank for rank, name in enumerate(BUILT_IN)}
    rank = ranks.get(after, ranks[DEFAULT_AFTER])
    # Not after the last pass that runs earlier, because some passes run a second time near the end.
    later = (i for i, name in enumerate(names) if ranks.get(name, rank) > rank)
    return next(later, len(names))


def passes_of_users(options: Options) -> list[Pass]:
    """Returns the passes that users added to the pipeline, without disabled ones."""
    added = [*(entry.added for entry in _registered.values()), *options.passes]
    return [each for each in added if each.name not in options.disable_passes]
