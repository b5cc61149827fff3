"""A page with the view in a real browser, which the gallery and the tests share."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import monarch_kernel.notebook.view
from monarch_kernel.base.events import HostView, MeshView, RankState, RankView
from monarch_kernel.notebook.view.frames import MeshFrame, ViewState, mesh_frame, to_json

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

STATIC = Path(monarch_kernel.notebook.view.__file__).parent / "static"
AT = 1_800_000_000.0

CHROMIUM_ARGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-features=SpareRendererForSitePerProcess",
)  # fmt: skip

# The variables of JupyterLab 4.6's themes that the view uses.
FONTS = {
    "ui-font-family": "system-ui, sans-serif",
    "ui-font-size1": "13px",
    "code-font-family": "'DejaVu Sans Mono', monospace",
}
THEMES = {
    "light": {
        **FONTS,
        "ui-font-color1": "rgba(0,0,0,.87)", "layout-color0": "white", "layout-color1": "white", "brand-color1": "#1976d2",
        "warn-color0": "#e65100", "error-color1": "#d32f2f",
    },
    "dark": {
        **FONTS,
        "ui-font-color1": "rgba(255,255,255,.87)", "layout-color0": "#111", "layout-color1": "#212121",
        "brand-color1": "#2196f3", "warn-color0": "#f57c00", "error-color1": "#f44336",
    },
    "contrast": {
        **FONTS,
        "ui-font-color1": "#fff", "layout-color0": "#111", "layout-color1": "#111", "brand-color1": "#319bf2",
        "warn-color0": "#f57c00", "error-color1": "#f44336",
    },
}  # fmt: skip

# JupyterLab's styles for all cell outputs.
OUTPUTS = """
    .jp-OutputArea-output :is(dl, dt, dd) { display: block; }
    .jp-OutputArea-output dl { width: 100%; overflow: hidden; padding: 0; margin: 0; }
    .jp-OutputArea-output dt { font-weight: bold; float: left; width: 20%; padding: 0; margin: 0; }
    .jp-OutputArea-output dd { float: left; width: 80%; padding: 0; margin: 0; }
    .jp-OutputArea-output pre {
        border: none; margin: 0; padding: 0; overflow: auto; word-break: break-all; white-space: pre-wrap;
    }
"""

ORIGIN = "http://view.invalid"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><title>View</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/view.css">
<style>body {{ margin: 0; background: var(--jp-layout-color1); }} {themes} {outputs}</style></head>
<body data-theme="light"><main class="jp-OutputArea-output"><div id="root"></div></main>
<script type="module">
  import {{ mount }} from "/view.js";
  window.sent = [];
  window.clock = {at};
  window.start = (options) => {{
    window.view?.dispose();
    window.sent = [];
    window.clock = {at};
    const root = document.getElementById("root");
    window.view = mount(root, {{ send: (message) => window.sent.push(message), now: () => window.clock, ...options }});
  }};
</script></body></html>"""


def why_not() -> str:
    """Say why no browser is available; empty if one is."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return "" if chromium() else "chromium is not installed"


def chromium() -> str | None:
    return os.environ.get("CHROMIUM_PATH") or shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_ARGS))
        try:
            yield found
        finally:
            found.close()


class ViewPage:
    """The view on a separate page; the test acts as its kernel.

    Args:
        found: a browser.
        width: width of the page, in pixels.
        scale: device pixels per page pixel.
    """

    def __init__(self, found: Browser, width: int = 900, scale: float = 1.0) -> None:
        self.errors: list[str] = []
        context = found.new_context(
            viewport={"width": width, "height": 700}, device_scale_factor=scale, reduced_motion="reduce"
        )
        self.page: Page = context.new_page()
        self.page.set_default_timeout(10_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.route(f"{ORIGIN}/**", _serve)
        self.page.goto(ORIGIN)
        self.page.wait_for_function("window.start !== undefined")

    def start(self, **options: object) -> None:
        """Mount the view again, as on a page that has just been opened."""
        self.page.mouse.move(0, 0)
        self.page.evaluate("options => window.start(options)", options)

    def receive(self, message: dict[str, Any]) -> None:
        """Send a message of the kernel, and wait until it is drawn."""
        self.page.evaluate("message => window.view.receive(message)", message)
        self.settle()

    def frame(self, frame: ViewState | dict[str, Any]) -> None:
        self.receive({"kind": "frame", **(to_json(frame) if isinstance(frame, ViewState) else frame)})

    def play(self, frames: list[ViewState]) -> None:
        """Draw frames with the clock at the time of each."""
        script = """async (frames) => {
            for (const frame of frames) {
                window.clock = frame.at;
                window.view.receive({ kind: "frame", ...frame });
                await new Promise(requestAnimationFrame);
            }
        }"""
        self.page.evaluate(script, [to_json(frame) for frame in frames])
        self.settle()

    def reply(self, text: str, *, ok: bool = True) -> None:
        """Answer the last command."""
        self.receive({"kind": "reply", "id": self.commands()[-1]["id"], "ok": ok, "text": text})

    def settle(self) -> None:
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def sent(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate("window.sent")
        return found

    def commands(self) -> list[dict[str, Any]]:
        return [message for message in self.sent() if message["kind"] == "command"]

    def theme(self, name: str) -> None:
        self.page.evaluate(
            """name => {
            document.body.dataset.theme = name;
            document.body.dataset.jpThemeName = name === "contrast" ? "JupyterLab Dark High Contrast" : name;
        }""",
            name,
        )

    def resize(self, width: int) -> None:
        self.page.set_viewport_size({"width": width, "height": 700})
        self.settle()


def _serve(route: Route) -> None:
    name = route.request.url.removeprefix(ORIGIN).strip("/")
    if name:
        kind = {"js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]]
        route.fulfill(body=(STATIC / name).read_text(encoding="utf-8"), content_type=f"{kind}; charset=utf-8")
        return
    themes = " ".join(
        f"[data-theme={theme}] {{ {' '.join(f'--jp-{key}: {value};' for key, value in colours.items())} }}"
        for theme, colours in THEMES.items()
    )
    route.fulfill(
        body=PAGE.format(themes=themes, outputs=OUTPUTS, at=json.dumps(AT)), content_type="text/html; charset=utf-8"
    )


# --- Meshes to look at -------------------------------------------------------------------------------------------------

AXES = {
    1: (("gpus", 1),),
    2: (("gpus", 2),),
    4: (("gpus", 4),),
    8: (("gpus", 8),),
    16: (("hosts", 2), ("gpus", 8)),
    32: (("hosts", 4), ("gpus", 8)),
    64: (("hosts", 8), ("gpus", 8)),
    256: (("hosts", 32), ("gpus", 8)),
    1024: (("dp", 16), ("pp", 8), ("tp", 8)),
}
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB in all"
KILLED = "RankDied: killed by SIGKILL (by the kernel's out-of-memory killer: oom_kill in /job rose from 0 to 1)"


def training(
    count: int, *, failed: tuple[int, ...] = (), dead: tuple[int, ...] = (), name: str = "trainers"
) -> MeshView:
    """Make a mesh of ranks in the middle of a step, some failed or dead."""
    chance = random.Random(count)
    axes = AXES[count]
    per_host = dict(axes).get("gpus", 8)
    ranks = tuple(_training_rank(i, axes, per_host, i in failed, i in dead, chance) for i in range(count))
    hosts = -(-count // per_host)
    where = "local" if hosts == 1 else f"Slurm: {hosts} hosts"
    return MeshView(name, axes, ranks, where, 754.0)


def _training_rank(
    rank: int, axes: tuple[tuple[str, int], ...], per_host: int, is_failed: bool, is_dead: bool, chance: random.Random
) -> RankView:
    common: dict[str, Any] = {
        "host": f"node{rank // per_host:02}",
        "device": f"cuda:{rank % per_host}",
        "last_line": "step 1240  loss 2.314  4,120 tokens/s",
    }
    point = tuple((name, 0) for name, _ in axes)
    if is_dead:
        return RankView(rank, point, "dead", last_error=KILLED, failed_s=38.0, **common)
    common |= {"pid": 41_200 + rank, "rss_nbytes": int(chance.uniform(3.1, 3.6) * 2**30)}
    taken = (78.9 if is_failed else chance.uniform(60, 63)) * 2**30
    common |= {"gpu_nbytes": int(taken), "gpu_total_nbytes": int(79.6 * 2**30)}
    if is_failed:
        return RankView(rank, point, "failed", last_error=OUT_OF_MEMORY, failed_s=41.0, cpu_percent=2.0, **common)
    if rank > 3 and chance.random() < 0.06:
        return RankView(rank, point, "idle", cpu_percent=1.0, restarts=1, **common)
    return RankView(
        rank, point, "running", activity="cell [12]", running_s=72.4, cpu_percent=chance.uniform(92, 101),
        gpu_percent=chance.uniform(94, 99),
        in_bytes_per_s=chance.uniform(3e8, 5e8), out_bytes_per_s=chance.uniform(0.5e8, 2.5e8), **common,
    )  # fmt: skip


def all_in(count: int, state: RankState, name: str = "trainers") -> MeshView:
    """Make a mesh of ranks that are all in one state and have done nothing yet."""
    axes = AXES[count]
    return MeshView(name, axes, tuple(RankView(i, (("gpus", i),), state) for i in range(count)), age_s=3.0)


def losing_a_host() -> MeshView:
    """Make a mesh that lost a host with half of its ranks."""
    whole = training(8, dead=(4, 5, 6, 7))
    lost = HostView(2, "node01", "lost", "it has sent nothing for 10 s")
    return MeshView("evaluators", (("hosts", 2), ("gpus", 4)), whole.ranks, "Slurm: 2 hosts (1 lost)", 95.0, (lost,))


def drawn(view: MeshView) -> MeshFrame:
    """Make the frame of a mesh, with the current lines of its running ranks."""
    running = [rank.rank for rank in view.ranks if rank.state == "running"]
    doing = dict.fromkeys(running, ("cell [12], line 7", ""))
    if any(rank.state in ("failed", "dead") for rank in view.ranks):
        doing = dict.fromkeys(running, ("cell [12], line 9", "all_reduce"))
    return mesh_frame(view, AT, doing=doing)


def history(into: float, out: float, seed: int = 0) -> list[list[int]]:
    """Make the throughput of the last minute: training steps and a pause."""
    chance = random.Random(seed)
    busy = [0.0 if 20 <= second < 28 or second < 4 else chance.uniform(0.7, 1.0) for second in range(60)]
    return [[round(into * each), round(out * each * chance.uniform(0.8, 1.0))] for each in busy]
