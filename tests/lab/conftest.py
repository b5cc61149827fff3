"""Fixtures for tests of a real JupyterLab in a real browser: a server, a page for each test, and user actions.

The tests are skipped, with the reason, if Chromium, JupyterLab, Playwright or the built extension is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipykernel.kernelspec
import pytest

from monarch_kernel import cli
from monarch_kernel.doctor.jupyter import LAB_EXTENSION
from tests.support.leftovers import starting_others
from tests.support.ports import free_ports
from tests.support.processes import children
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Playwright

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "labextension" / "dist"
OLDEST = ROOT / ".venv-oldest" / "bin" / "python"
OLDEST_TOO = pytest.mark.parametrize("server", ["newest", "oldest"], indirect=True)
AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
SLOW_MS = 30_000  # much more than any step takes

# Cells.
UP = "%mesh up t -n 2 --device cpu"
SLEEPS = "%%remote t\nimport time\ntime.sleep(300)"

# The browser loads only pages of these tests, and containers offer no sandbox.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
# Extensions that these tests do not need: without them Chromium takes less processor time to load a page.
UNUSED = tuple(
    f"@jupyterlab/{name}"
    for name in (
        *("audio-extension", "celltags-extension", "console-extension", "csvviewer-extension", "debugger-extension"),
        *("documentsearch-extension", "extensionmanager-extension", "fileeditor-extension", "help-extension"),
        *("htmlviewer-extension", "hub-extension", "imageviewer-extension", "inspector-extension"),
        *("javascript-extension", "json-extension", "logconsole-extension", "lsp-extension"),
        *("markdownviewer-extension", "mathjax-extension", "mermaid-extension", "metadataform-extension"),
        *("pdf-extension", "pluginmanager-extension", "settingeditor-extension"),
        *("terminal-extension", "toc-extension", "tooltip-extension", "vega5-extension", "video-extension"),
        # Plugins that require the ones above.
        *("notebook-extension:language-server", "notebook-extension:search", "notebook-extension:toc"),
        "notebook-extension:update-raw-mimetype",
    )
)
# Errors that JupyterLab itself logs when a kernel restarts, or when a page loads while the kernel is busy.
ALLOWED = re.compile(
    r"Canceled future for \w+ message before replies were done"
    r"|History was unable to be retrieved"
    r"|Connection lost, reconnecting in"
    r"|Comm not found for comm id [0-9a-f]{32}$"  # a kernel that ends closes the comms of widgets
    r"|widget model not found"  # in a notebook whose kernel is gone
    # In JupyterLab 4.2, two computations of a toolbar that run at once remove items from under each other.
    r"|Error while computing the ReactiveToolbar TypeError: Invalid value used as weak map key"
    r"|Unsatisfied version \S+ of shared singleton module @jupyterlab"
)


def chromium() -> str | None:
    """Find an installed browser; none is downloaded."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM_PATH") or next(filter(None, map(shutil.which, names)), None)


def missing() -> str:
    """Name a missing requirement of these tests, if any."""
    for module in ("jupyterlab", "playwright"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if not chromium():
        return "Chromium is not installed"
    if not (EXTENSION / "package.json").exists():
        return "labextension/ is not built (npm run build)"
    return ""


class Server:
    """A JupyterLab server with its own directories.

    Args:
        folder: folder for all files that it writes.
        python: the interpreter of the server; kernels use that of the tests.
        disabled: extensions of JupyterLab, or plugins of them, that pages do not load.

    Attributes:
        url: address of the server.
        token: grants full access.
        notebooks: the folder that it serves.
    """

    def __init__(self, folder: Path, python: str = sys.executable, disabled: Collection[str] = ()) -> None:
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        self.token = secrets.token_hex(16)
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        places = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        environment = {
            **os.environ,
            **{f"JUPYTER_{place}": str(folder / place) for place in places},
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        # Test the extension and the kernel of this working tree, not installed ones.
        extension = folder / "share" / "labextensions" / LAB_EXTENSION
        extension.parent.mkdir(parents=True)
        extension.symlink_to(EXTENSION)
        kernel = cli.install(prefix=str(folder))
        ipykernel.kernelspec.install(prefix=str(folder), kernel_name="plain")
        environment["JUPYTER_PATH"] = os.pathsep.join((str(folder / "share"), str(kernel.parents[1])))
        page_config = folder / "CONFIG_DIR" / "labconfig" / "page_config.json"
        page_config.parent.mkdir(parents=True)
        # Each page would start Node.js several times, to find out whether it can build extensions.
        page_config.write_text(json.dumps({"disabledExtensions": dict.fromkeys(disabled, True), "buildCheck": False}))
        notices = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        notices.parent.mkdir(parents=True)
        notices.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(python, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
                    *("--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}", "--allow-root"),
                    *(f"--ServerApp.root_dir={self.notebooks}", "--LabApp.extension_manager=readonly"),
                    "--LabApp.expose_app_in_browser=True",
                ],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Wait until the server answers."""
        wait_until(self._answers, f"the server to answer; its log is {self._log}")
        return self

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(urllib.error.URLError, ConnectionError):
            self.call("GET", "status")
            return True
        return False

    def call(self, method: str, path: str) -> Any:
        """Call the API of the server."""
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def end_kernels(self) -> None:
        """End all kernels, at the same time: each takes a second."""
        with ThreadPoolExecutor() as pool:
            for kind in ("sessions", "kernels"):
                paths = [f"{kind}/{each['id']}" for each in self.call("GET", kind)]
                list(pool.map(lambda path: self.call("DELETE", path), paths))

    def close(self) -> None:
        with suppress(ProcessLookupError):  # the server has already ended
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def write(self, name: str, *cells: str, kernel: str = "monarch") -> str:
        """Write a notebook, and return its name."""
        made = {
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"c{i}",
                    "source": cell,
                    "metadata": {},
                    "outputs": [],
                    "execution_count": None,
                }
                for i, cell in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.notebooks / name).write_text(json.dumps(made))
        return name


class Lab:
    """JupyterLab in a page, with the actions of a user.

    Attributes:
        page: the page.
        server: the server of the page.
        errors: unexpected errors on the console.
    """

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self.server = server
        self.errors: list[str] = []
        page.set_default_timeout(SLOW_MS)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))

    def _note(self, text: str) -> None:
        if not ALLOWED.search(text):
            self.errors.append(text)

    def load(self, notebook: str = "", *, reset: bool = True, workspace: str = "") -> Lab:
        """Load the page, with or without an open notebook whose kernel is idle."""
        place = f"/lab/workspaces/{workspace}" if workspace else "/lab"
        place += f"/tree/{notebook}" if notebook else ""
        self.page.goto(f"{self.server.url}{place}?token={self.server.token}{'&reset' if reset else ''}")
        self.wait_loaded()
        if notebook and reset:
            self.wait_idle()
        return self

    def reload(self) -> None:
        self.page.reload()
        self.wait_loaded()

    def wait_loaded(self) -> None:
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        self.page.wait_for_function("window.jupyterapp")  # the splash may not have appeared yet
        self.page.evaluate("window.jupyterapp.restored")  # until then the layout is not final

    def wait_idle(self) -> None:
        """Wait until the kernel of the current notebook is idle."""
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()

    def command(self, name: str, **arguments: Any) -> None:
        """Run a command of JupyterLab, like the palette; the test answers its dialogs."""
        self.page.evaluate("([name, given]) => void window.jupyterapp.commands.execute(name, given)", [name, arguments])

    def use_theme(self, name: str) -> None:
        """Change the theme, and wait for its style sheets."""
        self.command("apputils:change-theme", theme=name)
        self.page.locator(f"body[data-jp-theme-light={str('Light' in name).lower()}]").wait_for(state="attached")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")  # the splash covers the page until then

    def open(self, notebook: str) -> None:
        """Open another notebook, and make it current."""
        self.command("docmanager:open", path=notebook)
        # The notebook before it is shown until then.
        self.page.wait_for_function(
            "name => window.jupyterapp.shell.currentWidget?.context?.path === name", arg=notebook
        )
        self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").first.wait_for()

    def save(self) -> None:
        """Save the current notebook."""
        self.command("docmanager:save")
        self.page.wait_for_function("document.querySelector('.jp-mod-dirty') === null")

    def show_panel(self) -> Locator:
        self.command("monarch-kernel:show-panel")
        self.panel.wait_for()
        return self.panel

    @property
    def panel(self) -> Locator:
        return self.page.locator("#monarch-mesh-panel")

    @property
    def status(self) -> Locator:
        """The status bar item about meshes."""
        return self.page.locator(".monarch-status")

    def cell(self, i: int) -> Locator:
        """Locate a cell of the current notebook."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell").nth(i)

    def prompt(self, i: int) -> Locator:
        """Locate the prompt of a cell, which shows its number, or that it runs."""
        return self.cell(i).locator(".jp-InputPrompt")

    def start(self, i: int) -> Locator:
        """Start a cell."""
        cell = self.cell(i)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        return cell

    def run(self, i: int) -> Locator:
        """Run a cell, and wait until it ends."""
        cell = self.start(i)
        cell.locator(".jp-InputPrompt").get_by_text(re.compile(r"\[\d+\]:")).wait_for()
        return cell

    def shot(self, name: str) -> None:
        """Take a picture of the page for a person to look at, if ``MONARCH_SHOTS`` names a folder for pictures."""
        if folder := os.environ.get("MONARCH_SHOTS"):
            self.page.screenshot(path=f"{folder}/{name}.png")

    def violations(self, selector: str) -> list[dict[str, Any]]:
        """Return the violations that axe-core finds in a part of the page."""
        if not AXE.exists():
            pytest.skip("axe-core is not installed (npm ci in labextension/)")
        self.page.evaluate(AXE.read_text())
        # The body of JupyterLab is 0 px high: axe would take everything for clipped, and check no contrast.
        self.page.add_style_tag(content="body { overflow: visible !important }")
        found = self.page.evaluate("selector => axe.run(selector, {})", selector)
        looked_at = [rule for rule in found["passes"] if rule["id"] == "color-contrast"]
        assert looked_at, "axe did not check the contrast"
        assert looked_at[0]["nodes"]
        return [{"id": each["id"], "nodes": [node["html"] for node in each["nodes"]]} for each in found["violations"]]


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    # The fixture of pytest-playwright lives as long as the session, and other tests would run inside its event loop.
    if why := missing():
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    before = set(children(os.getpid()))
    with sync_playwright() as started, starting_others(set(children(os.getpid())) - before):
        yield started


@contextmanager
def serving(folder: Path, python: str = sys.executable, disabled: Collection[str] = ()) -> Iterator[Server]:
    """A server that answers."""
    server = Server(folder, python, disabled)
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="package", params=["newest"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the JupyterLab in the environment of the tests, or of the oldest supported one.

    With a parameter in all tests, those with `OLDEST_TOO` share the server of the others.
    """
    if why := missing():
        pytest.skip(why)
    python = sys.executable
    if request.param == "oldest":
        python = str(OLDEST)
        if not OLDEST.exists():
            pytest.skip(f"there is no {OLDEST.relative_to(ROOT)} with the oldest JupyterLab (make .venv-oldest/.stamp)")
    with serving(tmp_path_factory.mktemp("lab"), python, UNUSED) as server:
        yield server


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """The browser of a module's tests; each test has its own profile in it."""
    browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
    yield browser
    browser.close()


@pytest.fixture
def lab(server: Server, browser: Browser) -> Iterator[Lab]:
    """JupyterLab in a page of a new profile; its console must have no unexpected errors."""
    lab = Lab(browser.new_context(viewport={"width": 1400, "height": 900}).new_page(), server)
    yield lab
    lab.page.context.close()
    server.end_kernels()
    assert lab.errors == []
