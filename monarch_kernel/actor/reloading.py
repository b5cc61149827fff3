"""Reload of classes and modules on living ranks: the side that requests it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_kernel.actor.actor import Actor, endpoints_among, endpoints_of, from_outline
from monarch_kernel.actor.endpoint_table import Interface
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import EditError, RemoteError, format_ranks
from monarch_kernel.features.editing.classes import Key, dump_classes, key_of, mro_after, travels_by_value
from monarch_kernel.features.editing.modules import LocalModules, ModuleEdit
from monarch_kernel.features.editing.patch import at_once
from monarch_kernel.features.editing.preview import EditPreview, Reloaded, Synced
from monarch_kernel.features.editing.sources import check_syntax, is_users
from monarch_kernel.features.record.notes import note_event
from monarch_kernel.net.wire.codec import Packed, dump, pack
from monarch_kernel.net.wire.messages import Conclude, ModuleSource, Reload, Reshaped, Sync
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.gather import gather, read_value

__all__ = ["Target", "check_class", "class_now", "reload_classes", "sync_modules"]


class Target(NamedTuple):
    """The processes that an edit applies to.

    Attributes:
        client: sends the requests.
        procs: the processes.
        region: their ranks.
        base: the extent of the mesh of processes as spawned.
        name: the name of that mesh.
    """

    client: Client
    procs: Sequence[int]
    region: Region
    base: Extent
    name: str


def class_now(cls: type[Actor] | str, actor: str) -> type:
    """Return the current class of the notebook with the name of an actor's class.

    Raises:
        TypeError: there is no such class.
    """
    if isinstance(cls, str):
        raise TypeError(
            f"this process has received {actor} as an argument, without its class {cls}: pass the class, {actor}.reload({cls})"
        )
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise TypeError(
            f"class {cls.__qualname__} no longer exists; pass the class that replaces it: {actor}.reload(...)"
        )
    return found


def reload_classes(
    target: Target, classes: Sequence[tuple[type, Key | None]], reserved: frozenset[str], names: Sequence[str] = ()
) -> Reloaded:
    """Replace living classes by these, on all ranks or on none.

    Args:
        target: the processes.
        classes: new classes, each with the key of the living classes that it replaces. With None it replaces a class of the
            same key, if that was redefined.
        reserved: names that endpoints can't have.
        names: names of classes that cells have redefined on the ranks themselves.

    Raises:
        TypeError: an argument is not a class, or is imported.
        EditError: the edit was refused, for the reasons in the text; nothing has changed.
        RanksError: ranks failed to make the classes (nothing has changed), or hooks of actors failed.
    """
    for cls, _ in classes:
        check_class(cls)
        if issubclass(cls, Actor):
            endpoints_of(cls, reserved)
    asked = [(cls, key) for cls, key in classes if key]
    what = ", ".join([*(cls.__qualname__ for cls, _ in asked), *names]) or "all classes"
    payload, frames = dump(dump_classes(classes), f"class {what}")
    these = tuple(names)
    edit = target.client.new_number()
    previews = _prepare(target, edit, f"reload({what})", lambda id: pack(Reload(id, edit, payload, these), frames))
    outlines = {actor: plain for preview in previews for actor, plain in preview.outlines.items()}
    actors = _ranks_by_name((rank, tuple(each.actors.values())) for rank, each in zip(target.region.ranks, previews))
    changes = tuple(dict.fromkeys(change for preview in previews for change in preview.changes))
    if not changes:
        _forget(target, edit)
        if not asked and not names:
            return Reloaded(target.name, {}, ())
        raise EditError(_no_match(what, asked, target, previews))
    try:
        _conclude(target, edit, f"{what} was reloaded on {target.name}, but __reload__ failed")
    finally:  # the class has changed even if a hook failed
        _update_handles(target.client, outlines, {key or key_of(cls): cls for cls, key in classes})
        left = tuple(dict.fromkeys(why for preview in previews for why in preview.left))
        found = Reloaded(target.name, actors, changes, left)
        note_event("edit", repr(found))
    return found


def check_class(cls: type) -> bool:
    """Check that a class can be reloaded.

    Raises:
        TypeError: ``cls`` is not a class, or is imported.
    """
    if not isinstance(cls, type):
        raise TypeError(f"reload() takes classes or their names, not {cls!r} (of type {type(cls).__name__})")
    if not travels_by_value(cls):
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if not is_users(file):
            raise TypeError(
                f"{cls.__qualname__} belongs to {cls.__module__}, which is not a module of yours: it can't be reloaded"
            )
        raise TypeError(
            f"{cls.__qualname__} is imported from {cls.__module__}: edit the file, then mesh.sync({cls.__module__!r})"
        )
    return True


def _prepare(target: Target, edit: int, what: str, make: Any) -> Sequence[EditPreview]:
    """Prepare an edit on all ranks, and return its effect on each. If a rank refuses, drop the edit on all of them.

    Raises:
        EditError: a rank refused the edit.
    """
    finish = gather(target.region, f"{what} failed on {target.name}", RemoteError, read_value, target.base)
    future = target.client.request(target.procs, make, what, finish)
    try:
        previews: Sequence[EditPreview] = future.get().values()
        reasons: dict[str, list[int]] = {}
        for rank, preview in zip(target.region.ranks, previews):
            for why in preview.refused:
                reasons.setdefault(why, []).append(rank)
        if reasons:
            lines = (f"    {format_ranks(ranks)} {why}" for why, ranks in reasons.items())
            raise EditError("\n".join([f"{what} was refused on {target.name}, and nothing has changed:", *lines]))
    except BaseException:
        _forget(target, edit)
        raise
    return previews


def sync_modules(target: Target, sources: Sequence[ModuleSource], local: LocalModules | None) -> Synced:
    """Reload edited modules, and the modules that depend on them, on all ranks or on none.

    Args:
        target: the processes.
        sources: the current text of the modules.
        local: the modules of this process, which are reloaded, too; None to leave them alone.

    Raises:
        SyntaxError: a module has a syntax error; nothing was sent.
        EditError: the edit was refused, for the reasons in the text; nothing has changed.
        RanksError: a module failed on a rank, and nothing has changed; or hooks of actors failed.
    """
    check_syntax(sources)
    edit = target.client.new_number()
    modules = tuple(sources)
    previews = _prepare(target, edit, "sync()", lambda id: pack(Sync(id, edit, modules)))
    here = None
    if local is not None:
        here = local.edit(sources)
        try:
            reasons = here.prepare()
            if reasons:
                here.undo()
                raise EditError("\n    ".join(["sync() was refused here, and nothing has changed:", *reasons]))
        except BaseException:
            _forget(target, edit)
            raise
    try:
        _conclude(target, edit, f"modules were reloaded on {target.name}, but __reload__ failed")
    finally:
        changed: set[str] = set()
        if here is not None:
            with at_once():
                here.conclude()
                here.classes.become()
            changed.update(here.edited, here.dependents)
        outlines = {actor: plain for preview in previews for actor, plain in preview.outlines.items()}
        _update_handles_of_modules(target.client, outlines, changed)
        found = _synced(target, sources, previews, here)
        if found.edited:
            note_event("edit", repr(found))
    return found


def _synced(
    target: Target, sources: Sequence[ModuleSource], previews: Sequence[EditPreview], here: ModuleEdit | None
) -> Synced:
    """Say what a reload of modules has changed."""
    by_rank = list(zip(target.region.ranks, (preview.modules for preview in previews)))
    edited = _ranks_by_name((rank, each.edited) for rank, each in by_rank)
    dependents = _ranks_by_name((rank, each.dependents) for rank, each in by_rank)
    absent = _ranks_by_name((rank, each.absent) for rank, each in by_rank)
    return Synced(
        target.name,
        edited,
        dependents,
        tuple(source.name for source in sources if source.name not in {*edited, *dependents, *absent}),
        absent,
        (*here.edited, *here.dependents) if here is not None else (),
        _ranks_by_name((rank, tuple(preview.actors.values())) for rank, preview in zip(target.region.ranks, previews)),
        tuple(dict.fromkeys(change for preview in previews for change in preview.changes)),
    )


def _ranks_by_name(found: Iterable[tuple[int, Sequence[str]]]) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, list[int]] = {}
    for rank, names in found:
        for name in names:
            ranks.setdefault(name, []).append(rank)
    return {name: tuple(these) for name, these in ranks.items()}


def _update_handles_of_modules(client: Client, outlines: Mapping[int, Any], changed: set[str]) -> None:
    """Update the endpoints of handles, here and in all other processes, after a reload of modules."""
    for actor, plain in outlines.items():
        interface: Interface | None = client.shared.get(actor)
        kind = "" if interface is None else interface.kind
        if interface is not None:
            known = interface.cls
            if isinstance(known, type) and not changed.isdisjoint(base.__module__ for base in known.__mro__):
                interface.change(known, endpoints_of(known, frozenset()))
            else:
                interface.change(known, {spec.name: spec for spec in map(from_outline, plain)})
        client.tell_all(pack(Reshaped(actor, kind, plain)))


def _forget(target: Target, edit: int) -> None:
    target.client.tell(target.procs, pack(Conclude(0, edit, False)))


def _conclude(target: Target, edit: int, failed: str) -> None:
    finish = gather(target.region, failed, RemoteError, read_value, target.base)

    def make(id: int) -> Packed:
        return pack(Conclude(id, edit, True))

    target.client.request(target.procs, make, "__reload__", finish).get()


def _no_match(what: str, classes: Sequence[object], target: Target, previews: Sequence[EditPreview]) -> str:
    if not classes:
        return f"nothing on {target.name} uses an older class {what} than the one that is defined there"
    others = sorted({f"{name} (a {cls})" for preview in previews for name, cls in preview.others})
    have = f"; it has the actors: {', '.join(others)}" if others else "; it has no actors"
    return f"nothing on {target.name} uses a class named {what}{have}"


def _update_handles(client: Client, outlines: dict[int, Any], becomes: Mapping[Key, type]) -> None:
    """Update the endpoints of handles, here and in all other processes, after a reload of classes."""
    for actor, plain in outlines.items():
        interface: Interface | None = client.shared.get(actor)
        kind = ""
        if interface is not None:
            known = interface.cls
            if isinstance(known, str):
                interface.update(known, plain)
            else:
                replacements = {base: becomes[key_of(base)] for base in known.__mro__ if key_of(base) in becomes}
                endpoints = endpoints_among(known, mro_after(known, replacements), frozenset())
                if endpoints.keys() == {one[0] for one in plain}:
                    interface.change(replacements.get(known, known), endpoints)
                else:
                    interface.change(
                        replacements.get(known, known), {spec.name: spec for spec in map(from_outline, plain)}
                    )
            kind = interface.kind
        client.tell_all(pack(Reshaped(actor, kind, plain)))
