"""Edits of the code that processes run."""

from __future__ import annotations

import os
from types import ModuleType

from monarch_kernel.actor.actor_mesh import RESERVED
from monarch_kernel.actor.proc_handle import ProcHandle
from monarch_kernel.actor.reloading import Target, check_class, reload_classes, sync_modules
from monarch_kernel.errors import RemoteError
from monarch_kernel.features.editing.classes import Key, classes_of_notebook, key_of
from monarch_kernel.features.editing.controller import EditingExtension
from monarch_kernel.features.editing.preview import Reloaded, Synced
from monarch_kernel.features.editing.sources import find_source, sources_for
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import (
    ListModules,
    ModuleSource,
)
from monarch_kernel.runtime.rpc.gather import gather, read_value

__all__ = ["ProcEditor"]


class ProcEditor(ProcHandle):
    """The methods of `ProcMesh` that replace classes and modules on its processes (`monarch_kernel.actor.reloading`)."""

    def reload(self, *classes: type | str) -> Reloaded:
        """Switch living actors and other objects to the current classes of the notebook, and wait until they use them.

        This replaces all classes on the ranks that have the same module and qualified name, and updates their subclasses.
        Objects keep their state; methods, endpoints and class attributes come from the new class. If a new class refers to
        other classes of the notebook that were redefined, these are replaced, too. If a class has a method
        ``__reload__(self)``, each actor runs it before its next message.

        Args:
            classes: classes of the notebook, or names of classes that a cell has redefined on the ranks. By default all
                redefined classes of the notebook.

        Raises:
            TypeError: an argument is not a class, or is imported.
            EditError: the edit was refused, for the reasons in the text; nothing has changed on any rank.
            RanksError: ranks could not make the classes, and nothing has changed; or a ``__reload__`` failed.
        """
        place = Target(self._client, self.procs, self._region, self.spawned_extent, self.name)
        names = [cls for cls in classes if isinstance(cls, str)]
        given: list[tuple[type, Key | None]]
        given = [(cls, key_of(cls)) for cls in classes if not isinstance(cls, str) and check_class(cls)]
        if not classes:
            given = [(cls, None) for cls in classes_of_notebook()]
        return reload_classes(place, given, RESERVED, names)

    def sources(self, what: ModuleType | str | os.PathLike[str] | None = None) -> list[ModuleSource]:
        """List the modules that `sync` would send, with their current text in files.

        Raises:
            ValueError: ``what`` is not one of the user's modules.
        """
        if what is not None:
            return sources_for(what)
        finish = gather(self._region, "listing modules failed", RemoteError, read_value, self.spawned_extent)
        listed = self._client.request(self.procs, lambda id: pack(ListModules(id)), "", finish, quiet=True).get()
        names = dict.fromkeys(name for there in listed.values() for name in there)
        return [source for name in names if (source := find_source(name)) is not None]

    def sync(self, what: ModuleType | str | os.PathLike[str] | None = None, *, here: bool = True) -> Synced:
        """Send edited modules to the ranks, reload them and the modules that depend on them, and wait until that is done.

        Objects keep their state and switch to the new classes. If a module fails, or the objects of a class can't switch,
        nothing changes on any rank.

        Args:
            what: a module or package, its name, or the path of a file or folder. By default all of the user's modules that the
                ranks have imported.
            here: whether this process reloads its own modules, too.

        Raises:
            ValueError: ``what`` is not one of the user's modules.
            SyntaxError: a module has a syntax error; nothing was sent.
            EditError: the edit was refused, for the reasons in the text; nothing has changed.
            RanksError: a module failed on a rank, and nothing has changed; or a ``__reload__`` failed.
        """
        sources = self.sources(what)
        place = Target(self._client, self.procs, self._region, self.spawned_extent, self.name)
        return sync_modules(place, sources, self.runtime.extension(EditingExtension).modules if here else None)
