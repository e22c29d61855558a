"""Passes of a user's own, and passes that are switched off."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from amp_fx.backend.pipeline import PASSES
from amp_fx.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from amp_fx.passes.base import Pass

DEFAULT_AFTER = "fold_casts"
_BUILT_IN = {kind.name: index for index, kind in enumerate(PASSES)}


@dataclasses.dataclass(frozen=True)
class AddedPass:
    """A pass of a user's own."""

    added: Pass
    after: str = DEFAULT_AFTER


_registered: OrderedDict[str, AddedPass] = OrderedDict()


def register_pass(new: Pass, *, after: str = DEFAULT_AFTER) -> RemovableHandle:
    """Runs a pass over every graph that is compiled or explained from now on.

    Args:
        new: The pass (``amp_fx.passes.base.Pass``). One that was registered under its name is
            replaced.
        after: The name of the pass that it runs after; where that one does not run, it takes
            its place.

    Returns:
        A handle whose ``remove()`` takes the pass out again.

    Raises:
        OptionError: It is no pass, has the name of one of amp_fx, or there is no pass ``after``.
    """
    check_pass("register_pass", new)
    if after not in _BUILT_IN and after not in _registered:
        raise OptionError(f"after={after!r}: {_no_such_pass(after, ())}")
    handle = RemovableHandle(_registered)
    handle.id = new.name  # type: ignore[assignment]
    _registered[new.name] = AddedPass(new, after)
    return handle


def check_pass(where: str, value: Any) -> None:
    """Refuses what is no pass that a user can add."""
    name = getattr(value, "name", None)
    if isinstance(value, type) or not isinstance(name, str) or not callable(_call_of(value)):
        raise OptionError(
            f"{where}: {value!r} is not a pass: give an object with a name and a method call(gm)"
        )
    if name in _BUILT_IN:
        raise OptionError(f"{where}: {name!r} is the name of a pass of amp_fx; give another one")


def _call_of(value: Any) -> Any:
    return getattr(value, "call", None)


def check_disabled(where: str, names: Iterable[str], added: Sequence[Pass]) -> None:
    """Refuses to switch off what does not exist, or what correctness needs."""
    for name in names:
        if name not in _BUILT_IN and name not in _registered and name not in _names(added):
            raise OptionError(f"{where}: {_no_such_pass(name, added)}")
        if any(kind.name == name and getattr(kind, "is_needed", False) for kind in PASSES):
            raise OptionError(f"{where}: results would be wrong without the pass {name!r}")


def _names(passes: Iterable[Pass]) -> list[str]:
    return [each.name for each in passes]


def _no_such_pass(name: str, added: Sequence[Pass]) -> str:
    known = [*_BUILT_IN, *_registered, *_names(added)]
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no pass {name!r}; the passes are {', '.join(known)}{meant}"


def with_added(
    passes: Iterable[Pass], added: Sequence[Pass], disabled: Iterable[str]
) -> tuple[Pass, ...]:
    """The passes to run: those of amp_fx, registered ones and given ones, but disabled ones."""
    found = list(passes)
    own: set[str] = set()
    for entry in (*_registered.values(), *map(AddedPass, added)):
        position = _position(found, entry.after)
        while position < len(found) and found[position].name in own:
            position += 1
        found.insert(position, entry.added)
        own.add(entry.added.name)
    return tuple(each for each in found if each.name not in disabled)


def _position(passes: Sequence[Pass], after: str) -> int:
    """Finds the position after another pass, or after where that pass would be."""
    names = _names(passes)
    if after in names:
        return names.index(after) + 1
    rank = _BUILT_IN.get(after, _BUILT_IN[DEFAULT_AFTER])
    return max(
        (i + 1 for i, name in enumerate(names) if _BUILT_IN.get(name, rank) < rank), default=0
    )


def passes_of_users(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Returns the passes that are not built in: graphs that are compiled later need only these."""
    return tuple(each for each in passes if each.name not in _BUILT_IN)


@contextlib.contextmanager
def in_cache_keys(passes: Iterable[Pass]) -> Iterator[None]:
    """Compile inside it: on-disk caches tell apart what passes of a user's own have done.

    Relies on ``cache_key_tag`` being part of the keys of inductor's and AOTAutograd's caches.
    """
    own = passes_of_users(passes)
    if not own:
        yield
        return
    from torch._functorch import config as functorch_config

    config: Any = torch.compiler.config
    keys = [f"{each.name}={getattr(each, 'cache_key', '')}" for each in own]
    tag = " ".join(filter(None, [config.cache_key_tag, f"amp_fx: {'; '.join(keys)}"]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(cache_key_tag=tag))
        if cache_options(own):
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


def cache_options(passes: Iterable[Pass]) -> dict[str, bool]:
    """Options for inductor that keep graphs out of its caches where a pass gives no key."""
    if all(each.name in _BUILT_IN or hasattr(each, "cache_key") for each in passes):
        return {}
    return {"fx_graph_cache": False, "fx_graph_remote_cache": False}
