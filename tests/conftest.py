"""Settings for every test, and the fixtures that most tests share.

A test leaves nothing behind (`tests/support/leftovers.py`), it chooses its tier by a marker (`tests/support/tiers.py`), and it
writes nothing into the user's home (`tests/support/scratch.py`).
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support import scratch
from tests.support.processes import children
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh

pytest_plugins = ["tests.support.leftovers", "tests.support.tiers"]

# The duration of an example depends on what else the machine does, so there is no deadline.
hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each module in one process, with ``-n`` and without ``--dist``."""
    from tests.support.schedule import Schedule

    config.option.loadscopereorder = False
    return Schedule(config, log) if config.option.dist == "load" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process of several
        from tests.support.schedule import longest_first

        items[:] = longest_first(items)


class SharedAgent:
    """Starts the host agent that tests share again, if a test of an earlier module has ended it.

    Otherwise the first test that spawns a mesh would start it, and seem to leave it behind.
    """

    def __init__(self) -> None:
        self._module: object = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        module = item.getparent(pytest.Module)
        if module is self._module or "session" not in getattr(item, "fixturenames", ()):
            return
        self._module = module
        if not any(line.endswith(b"\0agent\0") for line in children(os.getpid()).values()):
            from tests.support.ranks import warm_up

            warm_up()


class Frozen:
    """Leaves what outlives a module out of garbage collections.

    Without it a collection takes half a second once all modules are loaded: in tests that collect, and each time that Python
    itself collects all. What the next module can use is not garbage, and a cycle that becomes garbage later only takes memory:
    all that holds a process, a socket or shared memory is closed by a call.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        gc.disable()  # what collection makes lasts, so searching it for garbage finds nothing
        try:
            return (yield)
        finally:
            gc.enable()

    def pytest_collection_finish(self) -> None:
        self._freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.getparent(pytest.Module) is not item.getparent(pytest.Module):
                self._freeze()

    def _freeze(self) -> None:
        gc.collect()
        gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SharedAgent())
    config.pluginmanager.register(Frozen())


def pytest_unconfigure() -> None:
    scratch.remove()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary directory for which a session's sockets have room in their paths; that of ``tmp_path`` is too long."""
    path = Path(tempfile.mkdtemp(prefix="t", dir=scratch.SCRATCH))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def session(nothing_left_by_the_session: None) -> Iterator[None]:
    """The host agent and the zygote of this pytest process; all tests share them, except those that need their own.

    If a test ends them (`shutdown_context`), they start again when the next mesh is spawned.
    """
    from monarch_kernel.actor import shutdown_context
    from tests.support.ranks import warm_up

    warm_up()
    yield
    shutdown_context().get(LONG_S)


@pytest.fixture
def own_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No session before and after a test that ends its session, or harms the agent; its ranks start without torch."""
    from monarch_kernel.actor import shutdown_context
    from monarch_kernel.runtime.controller.session import LocalAgents

    shutdown_context().get(LONG_S)
    monkeypatch.setattr(LocalAgents, "is_light", True)
    yield
    shutdown_context().get(LONG_S)


@pytest.fixture(scope="module")
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Send classes and functions of the module, and shared actors, to ranks by value, since ranks cannot import tests."""
    import cloudpickle

    from tests.support import actors, waiting

    modules = (sys.modules[request.module.__name__], actors, waiting)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def procs(session: None, by_value: None, request: pytest.FixtureRequest) -> Iterator[ProcMesh]:
    """A mesh that the tests of a module share: CPU ranks along the axes that ``PROCS`` in the module names.

    The default is two ranks along ``r``. The name of the mesh is ``t``.
    """
    from monarch_kernel.actor import this_host

    mesh = this_host().spawn_procs(getattr(request.module, "PROCS", {"r": 2}), name="t", device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)
