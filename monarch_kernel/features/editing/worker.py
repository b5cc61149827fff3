"""The rank's part of edits: updates the classes of running actors.

Theory of operation
===================

An edit has two steps, so that all ranks refuse it if one rank does. First each rank loads the new classes, finds the existing
classes with the same names, and replies with its objections; nothing has changed yet. Then the rank receives `Conclude`: it
updates the existing classes to the new ones (`features.editing.patch`), or forgets the new ones.

This happens on the main thread, in order with cells, whatever the actors are doing: an actor that runs an endpoint for hours
uses the new methods at its next call of them. If a class has a method ``__reload__``, it is called for each actor, on the
actor's own thread (or event loop), before the next message; the answer to `Conclude` waits for these calls.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

from monarch_kernel.features.editing.class_mapping import ClassMapping
from monarch_kernel.features.editing.classes import (
    Arrived,
    identify,
    is_numbered,
    key_of,
    living_classes,
    load_classes,
    mro_after,
)
from monarch_kernel.features.editing.import_hook import Imports
from monarch_kernel.features.editing.modules import ModuleEdit
from monarch_kernel.features.editing.patch import at_once, has_instances, is_same_code
from monarch_kernel.features.editing.preview import ClassChange, EditPreview, ModulesChange
from monarch_kernel.net.transport.driver import Driver, Waiter
from monarch_kernel.net.wire.codec import Frame, load, pack
from monarch_kernel.net.wire.messages import Conclude, Fetch, Fetched, ListModules, ModuleSource, Reload, Reshaped, Sync
from monarch_kernel.net.wire.shared_classes import adopt
from monarch_kernel.runtime.worker.client import RankItem
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Hosted", "Renewal"]

BEGIN_S = 60.0
ASK_S = 5.0
ASK_KEPT_S = 1.0
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Hosted(Protocol):
    """An actor on this rank, as edits use it."""

    actor: int
    cls: type
    is_async: bool
    class_known: threading.Event

    @property
    def name(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    @property
    def instance(self) -> Any: ...
    def renew(self) -> None: ...
    def endpoints_with(self, bases: Sequence[type]) -> Mapping[str, Any]: ...
    def put_first(self, function: Callable[[], Any]) -> Waiter: ...


class _Prepared:
    """An edit that waits for `Conclude`.

    Attributes:
        classes: the mapping of existing classes to new ones.
        numbers: classes with the numbers by which other processes know them.
        actors: actors whose class changes.
        sources: name of a cell -> source of the new classes that it defines.
        modules: the edit of modules, if the edit is a `Sync`.
    """

    def __init__(self) -> None:
        self.classes = ClassMapping()
        self.numbers: list[tuple[type, str]] = []
        self.actors: list[Hosted] = []
        self.sources: dict[str, str] = {}
        self.modules: ModuleEdit | None = None


@register
class Renewal:
    """Applies edits on a rank: updates the classes of its actors, and reloads modules."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._turns = itertools.count(1)
        self._asked: dict[int, tuple[Waiter, list[ModuleSource | None]]] = {}
        self._patience_s = ASK_KEPT_S if rank.spec.record else ASK_S
        self._imports = Imports(self._ask)
        self._imports.install()
        self._superseded: WeakSet[type] = WeakSet()  # classes that exist until they are garbage-collected
        self._prepared: tuple[int, _Prepared] | None = None
        rank.extend({Reload: self._reload, Conclude: self._conclude}, on_main=True, from_ranks=True)
        rank.extend({ListModules: self._list_modules, Sync: self._sync}, on_main=True)
        rank.extend({Reshaped: self._handle_reshaped, Fetched: self._handle_fetched})

    # -- imports

    def _ask(self, name: str) -> ModuleSource | None:
        """Ask the controller for a module, and wait for the answer on the thread that imports it."""
        turn, waiter = next(self._turns), Waiter()
        answer: list[ModuleSource | None] = []
        self._asked[turn] = waiter, answer
        self._rank.driver.submit(pack(Fetch(turn, name)))
        try:
            self._rank.driver.wait(waiter, self._patience_s)
        finally:
            del self._asked[turn]
        return answer[0] if answer else None

    def _handle_fetched(self, message: Fetched, _: Sequence[Frame]) -> None:
        asked = self._asked.get(message.turn)
        if asked is not None:
            asked[1].append(message.module)
            self._rank.driver.serve(asked[0])

    # -- edits

    def _reload(self, message: Reload, frames: Sequence[Frame]) -> None:
        self._undo()
        with self._rank.main.user_code():
            hosts = self._hosts()
            data, sources = load(message.payload, frames)
            arrived = load_classes(data)
            self._superseded.update(each.cls for each in arrived)
            arrived += [self._find(name) for name in message.names]
            living = living_classes(arrived, {*self._superseded, *(each.cls for each in arrived)})
        asked = [each for each in arrived if each.as_key]
        if not any(living[each.cls] for each in asked or arrived):
            self._prepared = message.edit, _Prepared()
            others = sorted((host.name, host.cls.__name__) for host in hosts)
            self._rank.reply(message.id, EditPreview(others=tuple(others)))
            return
        prepared = _Prepared()
        prepared.sources = sources
        outlines: dict[int, Any] = {}
        _pair(arrived, living, {base for host in hosts for base in host.cls.__mro__}, prepared)
        left: list[str] = []
        refused = self._check_classes({each.cls for each in asked}, prepared, left)
        refused += self._check_actors(hosts, prepared, outlines)
        if refused:
            self._rank.reply(message.id, EditPreview(refused=tuple(refused)))
            return
        self._prepared = message.edit, prepared
        actors = {host.actor: host.name for host in prepared.actors}
        changes = tuple(_change(new, old) for new, old in prepared.classes.pairs.items())
        self._rank.reply(message.id, EditPreview(actors, outlines, changes, left=tuple(left)))

    def _find(self, name: str) -> Arrived:
        """Find a class that cells have defined on this rank."""
        first, *rest = name.split(".")
        found = self._rank.shell.namespace.get(first)
        for part in rest:
            found = getattr(found, part, None)
        if not isinstance(found, type):
            raise NameError(f"no class {name!r} is defined on this rank")
        return Arrived(found, key_of(found), "", key_of(found))

    def _handle_reshaped(self, message: Reshaped, _: Sequence[Frame]) -> None:
        interface = self._rank.peers.shared.get(message.actor)
        if interface is not None:
            interface.update(message.kind or interface.kind, message.outlines)

    def _list_modules(self, message: ListModules, _: Sequence[Frame]) -> None:
        self._rank.reply(message.id, [name for name in self._imports.loaded if name in sys.modules])

    def _sync(self, message: Sync, _: Sequence[Frame]) -> None:
        self._undo()
        prepared = _Prepared()
        outlines: dict[int, Any] = {}
        with self._rank.main.user_code():
            hosts = self._hosts()
            edit = ModuleEdit(message.modules, self._imports.loaded, self._superseded)
            refused = edit.prepare()
            prepared.modules, prepared.classes = edit, edit.classes
            refused += self._check_actors(hosts, prepared, outlines)
        if refused:
            edit.undo()
            self._rank.reply(message.id, EditPreview(refused=tuple(refused)))
            return
        self._prepared = message.edit, prepared
        self._imports.edited.update(edit.edited, edit.absent)
        actors = {host.actor: host.name for host in prepared.actors}
        changes = tuple(
            change for new, old in prepared.classes.pairs.items() if not (change := _change(new, old)).is_empty
        )
        modules = ModulesChange(edit.edited, edit.dependents, edit.unchanged, edit.absent)
        self._rank.reply(message.id, EditPreview(actors, outlines, changes, modules=modules))

    def _undo(self) -> None:
        """Drop an edit that was prepared, but never concluded."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[1].modules is not None:
            prepared[1].modules.undo()

    def _hosts(self) -> list[Hosted]:
        """The actors of this rank. Waits for new actors, which may have to unpickle their class first."""
        hosts = [host for host in list(self._rank.hosted.values()) if not host.ended]
        for host in hosts:
            host.class_known.wait(BEGIN_S)
        return hosts

    def _check_classes(self, asked: Collection[type], prepared: _Prepared, left: list[str]) -> list[str]:
        """Objections to an edit of classes. If the class came only because others refer to it, drops it from the edit."""
        refused = []
        for old, why in prepared.classes.objections().items():
            if prepared.classes.new_of(old) in asked:
                refused.append(f"{old.__qualname__}: {why}")
            else:
                left.append(f"{old.__qualname__} stays as it is: {why}")
                prepared.classes.leave(old)
        return refused

    def _check_actors(self, hosts: Sequence[Hosted], prepared: _Prepared, outlines: dict[int, Any]) -> list[str]:
        """Objections to an edit because of actors. Also collects the actors concerned, and their new endpoints."""
        refused = []
        becomes = prepared.classes.becomes()
        for host in hosts:
            if set(becomes).isdisjoint(host.cls.__mro__):
                continue
            prepared.actors.append(host)
            try:
                specs = host.endpoints_with(mro_after(host.cls, becomes))
            except ValueError as error:
                refused.append(str(error))
                continue
            outlines[host.actor] = tuple(spec.outline() for spec in specs.values())
            if any(spec.is_async is not host.is_async for spec in specs.values()):
                kinds = "async" if host.is_async else "sync", "sync" if host.is_async else "async"
                refused.append(
                    f"{host.cls.__qualname__}: the endpoints of actor {host.name!r} are {kinds[0]} and would be {kinds[1]}; "
                    "an actor's thread can't change that: spawn it again"
                )
        return list(dict.fromkeys(refused))

    def _conclude(self, message: Conclude, _: Sequence[Frame]) -> None:
        if not message.keep:
            self._undo()
            if message.id:
                self._rank.reply(message.id)
            return
        known, self._prepared = self._prepared, None
        if known is None or known[0] != message.edit:
            raise RuntimeError("another edit replaced this one; this rank has changed nothing")
        prepared = known[1]
        for file, text in prepared.sources.items():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        hooks = _Hooks(self._rank.driver, lambda failed: self._answer(message.id, failed))
        with at_once():
            if prepared.modules is not None:
                prepared.modules.conclude()
            prepared.classes.become()
            for former, successor in (*prepared.classes.pairs.items(), *prepared.classes.aliases.items()):
                adopt(former, successor)
            self._superseded.update(prepared.classes.pairs)
            for cls, number in prepared.numbers:
                identify(cls, number)
                self._superseded.discard(cls)
            self._superseded.update(prepared.classes.aliases)
            for host in prepared.actors:
                host.cls = prepared.classes.aliases.get(host.cls, host.cls)
                host.renew()
                hooks.run(host)
        hooks.start()

    def _answer(self, id: int, failed: BaseException | None) -> None:
        if failed is None:
            self._rank.reply(id)
        else:
            self._rank.fail(self._rank.main, id, failed)


class _Hooks:
    """Runs the ``__reload__`` method of each actor, and calls ``done`` after the last one."""

    def __init__(self, driver: Driver[RankItem], done: Callable[[BaseException | None], None]) -> None:
        self._driver = driver
        self._left = 1
        self._done = done
        self._failed: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, host: Hosted) -> None:
        """Run the hook of an actor before its next message."""
        if not hasattr(host.cls, "__reload__"):
            return
        with self._lock:
            self._left += 1

        def call() -> Any:
            instance = host.instance  # it may still be under construction, by its old ``__init__``
            return None if instance is None else instance.__reload__()

        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._over(error)
            else:
                self._over(None)

        async def run_async() -> None:
            try:
                result = call()
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:
                self._over(error)
            else:
                self._over(None)

        waiter = host.put_first(run_async if host.is_async else run)
        self._driver.submit(lambda: self._driver.serve(waiter))

    def start(self) -> None:
        """Allow ``done`` to be called; no more hooks are added."""
        self._over(None)

    def _over(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            self._failed = self._failed or error
            over = not self._left
        if over:
            self._done(self._failed)


def _pair(
    arrived: Sequence[Arrived], living: Mapping[type, list[type]], in_use: Collection[type], prepared: _Prepared
) -> None:
    """Pair existing classes with new ones. Of several classes with the name, prefer one that is in use."""
    for each in arrived:
        olds = living[each.cls]
        if not olds:
            prepared.numbers.append((each.cls, each.number))
            continue
        lives_on = olds[0]
        if len(olds) > 1:
            lives_on = max(
                reversed(olds), key=lambda cls: (is_numbered(cls, each.number), cls in in_use, has_instances([cls]))
            )
        if each.as_key is None and is_numbered(lives_on, each.number):  # others refer to it, and it was not redefined
            prepared.classes.add_same(each.cls, lives_on)
        else:
            lives_on = prepared.classes.add(each.cls, olds, lives_on)
        prepared.numbers.append((lives_on, each.number))


def _change(new: type, old: type) -> ClassChange:
    ours, theirs = _members(old), _members(new)
    return ClassChange(
        old.__qualname__,
        changed=tuple(sorted(name for name in ours.keys() & theirs.keys() if _differ(ours[name], theirs[name]))),
        added=tuple(sorted(theirs.keys() - ours.keys())),
        removed=tuple(sorted(ours.keys() - theirs.keys())),
    )


def _members(cls: type) -> dict[str, Any]:
    """The members that the user has written into a class, without those that Python adds."""
    return {
        name: value
        for name, value in vars(cls).items()
        if is_same_code(value, value) or not (name.startswith("__") and name.endswith("__"))
    }


def _differ(one: Any, other: Any) -> bool:
    """Whether two members certainly differ, as far as can be determined without running code of the user."""
    if type(one) is type(other) and isinstance(one, _PLAIN):
        return bool(one != other)
    return is_same_code(one, one) and not is_same_code(one, other)
