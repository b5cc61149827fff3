"""Takes pictures of the view in each of its states, light and dark: ``python -m tests.notebook.view.gallery [--all FOLDER]``.

The scenes of `KEPT` go to ``docs/pictures``, so that the documentation shows the view as it looks. ``--all`` instead writes
every scene to a folder, for a look, and ``--states`` those of `STATES` at each of `WIDTHS`.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import itertools
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch_kernel.base.events import CurvePoint, CurveView, KnobView, LoopView, MeshView, RankView, WaitView
from monarch_kernel.notebook.view.frames import MeshFrame, RankFrame, ViewState, curves_message, mesh_frame
from tests.notebook.view.pages import AT, ViewPage, all_in, browser, drawn, history, losing_a_host, training

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"

STACKS = """trainers: 4 ranks, 3 busy
[0-1,3] cell [12], line 9: loss = all_reduce(loss) / world_size
    waits in all_reduce #1240 (shape 1) for 1 min 12 s
    [2] has not started it
[2] idle"""
TRACEBACK = """\x1b[0;31mtorch.OutOfMemoryError\x1b[0m: CUDA out of memory. Tried to allocate 2.00 GiB.
cell [12], line 7, on rank 2
      5 for batch in batches:
      6     optimizer.zero_grad()
----> 7     logits = model(batch)        # batch: int64[64, 4096] on cuda:2
      8     loss = loss_of(logits, batch)"""


def show(page: ViewPage, *meshes: MeshView | MeshFrame) -> None:
    """Draw meshes, with a minute of throughput behind them."""
    frames = tuple(each if isinstance(each, MeshFrame) else drawn(each) for each in meshes)
    histories = {each.name: history(each.in_rate, each.out_rate, i) for i, each in enumerate(frames)}
    page.receive({"kind": "history", "meshes": histories})
    for second in range(0, 40, 2):
        earlier = tuple(_earlier(each, second, histories[each.name][20 + second]) for each in frames)
        page.play([ViewState(AT - 40 + second, earlier, second)])
    page.play([ViewState(AT, frames, 40)])


def _earlier(mesh: MeshFrame, second: int, rates: list[int]) -> MeshFrame:
    """Return the mesh at an earlier second, when its ranks received less, or paused."""
    chance = random.Random(second)

    def scaled(rank: RankFrame) -> RankFrame:
        part = 0.0 if rates[0] == 0 else chance.uniform(0.5, 1.0)
        return dataclasses.replace(rank, in_rate=round(rank.in_rate * part), out_rate=round(rank.out_rate * part))

    return dataclasses.replace(
        mesh, ranks=tuple(scaled(rank) for rank in mesh.ranks), in_rate=rates[0], out_rate=rates[1]
    )


def up(page: ViewPage) -> None:
    page.frame(ViewState(AT, (drawn(all_in(4, "idle")),)))


def hung(page: ViewPage) -> None:
    """Show ranks that wait for one that reads its next batch."""
    line = "[0-1,3] wait for 36 s in all_reduce #1240 (shape 4096x4096), cell [12], line 9; "
    wait = WaitView(f"{line}[2] has not started it: cell [12], line 5: batch = next(batches)", (0, 1, 3), (2,))
    view = dataclasses.replace(training(4), waits=(wait,))
    idle = tuple(rank._replace(cpu_percent=1.0, in_bytes_per_s=0.0, out_bytes_per_s=0.0) for rank in view.ranks)
    place = ("cell [12], line 9", "all_reduce")
    doing = dict.fromkeys((0, 1, 3), place) | {2: ("cell [12], line 5", "")}
    show(page, mesh_frame(dataclasses.replace(view, ranks=idle), AT, doing=doing))


def healed(page: ViewPage) -> None:
    """Show a mesh after a heal: the new process has nothing to show but that it is one."""
    view = training(4)
    new = RankView(3, view.ranks[3].point, "idle", host="node00", pid=41_399, rss_nbytes=190 << 20, restarts=1)
    resting = {"cpu_percent": 0.0, "gpu_percent": 0.0, "in_bytes_per_s": 0.0, "out_bytes_per_s": 0.0}
    others = tuple(rank._replace(state="idle", activity="", running_s=0.0, **resting) for rank in view.ranks[:3])
    show(page, dataclasses.replace(view, ranks=(*others, new)))


def paused(page: ViewPage) -> None:
    view = dataclasses.replace(training(4), loops=(loop()._replace(state="paused"),))
    page.frame(ViewState(AT, (drawn(view),)))
    page.receive(curves_message(view.name, view.loops))


def trouble(page: ViewPage) -> None:
    show(page, training(4, failed=(2,), dead=(3,)))


def live_loop(page: ViewPage) -> None:
    """Show a loop with curves and knobs after the user has set a knob."""
    view = dataclasses.replace(training(4), loops=(loop(),))
    show(page, view)
    page.receive(curves_message(view.name, view.loops))
    page.page.get_by_label("Knob lr", exact=True).fill("0.0001")
    page.page.get_by_label("Knob lr", exact=True).press("Enter")
    page.reply("lr is 0.0001 from step 6,214 on")
    page.frame(ViewState(AT, (drawn(dataclasses.replace(view, loops=(loop(lr=0.0001),))),)))
    page.page.get_by_label("Knob lr", exact=True).blur()


def curves(page: ViewPage) -> None:
    """Show curves with those of earlier loops, and the values of the step under the pointer."""
    view = dataclasses.replace(training(4), loops=(loop(),))
    page.frame(ViewState(AT, (drawn(view),)))
    earlier = [loop()._replace(where=f"cell [{cell}]") for cell in (9, 11)]
    for at, each in enumerate(earlier):
        scaled = tuple(
            curve._replace(points=tuple(point._replace(mean=point.mean * (1.1 + at / 5)) for point in curve.points))
            for curve in each.curves
        )
        earlier[at] = each._replace(curves=scaled)
    page.receive(curves_message(view.name, view.loops, earlier))
    page.page.get_by_role("button", name="Earlier loops").click()
    page.page.get_by_role("button", name="Log scale").click()
    page.page.get_by_role("combobox").select_option("0.9")
    page.page.locator(".mk-curve-area").first.hover()


def reply(page: ViewPage) -> None:
    show(page, training(4, failed=(2,)))
    page.page.get_by_role("button", name="Stacks").click()
    page.reply(STACKS)
    page.page.get_by_role("button", name="Interrupt", exact=True).click()
    page.reply("rank 2 is stuck in native code; aborting its process groups may free it", ok=False)
    page.page.get_by_role("button", name="Traceback of").click()
    page.reply(TRACEBACK)
    page.page.get_by_role("button", name="Restart").click()
    page.page.mouse.move(0, 0)


def closed(page: ViewPage) -> None:
    show(page, training(4))
    page.receive({"kind": "closed"})


def large(page: ViewPage, count: int, failed: tuple[int, ...], dead: tuple[int, ...]) -> None:
    show(page, training(count, failed=failed, dead=dead))
    page.page.get_by_role("gridcell").focus()
    page.page.keyboard.press("n")


def misfit(page: ViewPage) -> None:
    page.frame(ViewState(AT, version=2))


def finished(page: ViewPage) -> None:
    page.frame(ViewState(AT, (dataclasses.replace(drawn(all_in(4, "stopped")), where="local"),)))


def loop(lr: float = 0.0003) -> LoopView:
    """Make the loop of a training run that goes well."""
    chance = random.Random(5)
    steps = range(31, 6208, 32)
    means = [(step, 1.9 + 4.2 * (step + 60) ** -0.35 * 2 + chance.gauss(0, 0.035)) for step in steps]
    loss = tuple(
        CurvePoint(step, mean, mean - 0.05 - abs(chance.gauss(0, 0.04)), mean + 0.05 + abs(chance.gauss(0, 0.04)), 2, 1)
        for step, mean in means
    )
    norms = [(step, 0.4 + 3 / (1 + step / 300) + abs(chance.gauss(0, 0.12))) for step in steps]
    norm = tuple(CurvePoint(step, value, value, value) for step, value in norms)
    curves = (
        CurveView("loss", loss[-1].mean, (), loss, ((2, loss[-1].least), (1, loss[-1].most))),
        CurveView("gradient norm", norm[-1].mean, (), norm),
    )
    knobs = (KnobView("lr", lr, 1e-6, 0.01), KnobView("dropout", 0.1, 0.0, 0.5), KnobView("augment", True))
    rates = (("tokens", 84_120.0), ("flops", 1.65e15))
    return LoopView(
        (9, 1),
        "trainers",
        "cell [12]",
        6_207,
        20_000,
        "running",
        72.4,
        0.0487,
        knobs,
        curves,
        rates,
        mfu=0.4169,
        left_s=672.0,
    )


STATES: dict[str, Callable[[ViewPage], None]] = {
    "01-up": up,
    "02-running": lambda page: show(page, training(4)),
    "03-hung": hung,
    "04-error": lambda page: show(page, training(4, failed=(2,))),
    "05-dead": lambda page: show(page, training(8, dead=(3,))),
    "06-healed": healed,
    "07-paused": paused,
    "08-down": lambda page: page.frame(ViewState(AT)),
    "09-64-ranks": lambda page: show(page, training(64, failed=(9,), dead=(30,))),
    "10-two-meshes": lambda page: show(page, training(2), losing_a_host()),
    "11-curves": curves,
}
WIDTHS = (240, 800, 1400)

SCENES: dict[str, Callable[[ViewPage], None]] = {
    "4": lambda page: show(page, training(4)),
    "4-trouble": trouble,
    "8": lambda page: show(page, training(8)),
    "32": lambda page: show(page, training(32, failed=(9,))),
    "256": lambda page: large(page, 256, (100, 101), (30,)),
    "1024": lambda page: large(page, 1024, (411, 413, 414, 800), tuple(range(640, 648))),
    "1024-well": lambda page: show(page, training(1024)),
    "loop": live_loop,
    "curves": curves,
    "answers": reply,
    "two": lambda page: show(page, training(2), losing_a_host()),
    "waiting": lambda page: page.page.get_by_text("Waiting for the kernel").wait_for(),
    "empty": lambda page: page.frame(ViewState(AT)),
    "starting": lambda page: page.frame(ViewState(AT, (drawn(all_in(8, "starting")),))),
    "all-failed": lambda page: show(page, training(8, failed=tuple(range(8)))),
    "all-dead": lambda page: show(page, training(2, dead=(0, 1))),
    "stopped": finished,
    "closed": closed,
    "misfit": misfit,
}
KEPT = {"4-trouble": 900, "32": 1100, "256": 900, "1024": 900, "loop": 900, "answers": 900, "closed": 900}
"""Scenes whose pictures are in the documentation, with their widths."""
NARROW = ("4-trouble", "256", "1024", "loop", "curves", "answers")
"""Scenes that ``--all`` also shows at the width of a side panel."""


PIXELS = """async (picture) => {
    const image = new Image();
    image.src = `data:image/png;base64,${picture}`;
    await image.decode();
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(0, 0, image.width, image.height);
    const colours = new Map();
    const pixels = Array.from({ length: data.length / 4 }, (_, i) => {
        const colour = [0, 1, 2].map((channel) => Math.round(data[4 * i + channel] / 17) * 17);
        const key = colour.join();
        if (!colours.has(key)) colours.set(key, { colour, count: 0 });
        colours.get(key).count++;
        return key;
    });
    const palette = [...colours.values()].sort((a, b) => b.count - a.count).slice(0, 256).map((each) => each.colour);
    const distance = (a, b) => a.reduce((sum, value, i) => sum + (value - b[i]) ** 2, 0);
    for (const each of colours.values()) {
        each.index = 0;
        palette.forEach((other, i) => {
            if (distance(other, each.colour) < distance(palette[each.index], each.colour)) each.index = i;
        });
    }
    let bytes = "";
    for (const key of pixels) bytes += String.fromCharCode(colours.get(key).index);
    return { width: image.width, height: image.height, palette, pixels: btoa(bytes) };
}"""
"""Reduces a picture to at most 256 colours of sixteen shades per channel, a third of the size."""


def indexed(picture: dict[str, Any]) -> bytes:
    """Encode a picture as a PNG file with a palette."""
    width, height = picture["width"], picture["height"]
    pixels = base64.b64decode(picture["pixels"])
    rows = b"".join(b"\0" + pixels[row * width : (row + 1) * width] for row in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", bytes(channel for colour in picture["palette"] for channel in colour)),
            chunk(b"IDAT", zlib.compress(rows, 9)),
            chunk(b"IEND", b""),
        )
    )


def shoot(
    page: ViewPage, scene: Callable[[ViewPage], None], theme: str, width: int, path: Path, *, small: bool = True
) -> None:
    page.theme(theme)
    page.resize(width)
    page.page.evaluate("localStorage.clear()")
    page.start()
    scene(page)
    page.settle()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = page.page.locator("#root").screenshot(animations="disabled")
    if not small:
        path.write_bytes(picture)
        return
    path.write_bytes(indexed(page.page.evaluate(PIXELS, base64.b64encode(picture).decode())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write all scenes there, and none to docs/pictures")
    parser.add_argument("--states", type=Path, metavar="FOLDER", help="write the states there, at three widths")
    parser.add_argument("scenes", nargs="*", help="the scenes to show; all by default")
    options = parser.parse_args()
    with browser() as found:
        page = ViewPage(found)
        if options.states is not None:
            for theme, (name, scene), width in itertools.product(("light", "dark"), STATES.items(), WIDTHS):
                shoot(page, scene, theme, width, options.states / f"{name}-{width}-{theme}.png", small=False)
            return
        for theme in ("light", "dark", *(("contrast",) if options.all is not None else ())):
            for scene in options.scenes or SCENES:
                if options.all is None:
                    if scene in KEPT:
                        shoot(page, SCENES[scene], theme, KEPT[scene], PICTURES / f"view-{scene}-{theme}.png")
                    continue
                shoot(page, SCENES[scene], theme, KEPT.get(scene, 900), options.all / f"{scene}-{theme}.png")
                if scene in NARROW:
                    shoot(page, SCENES[scene], theme, 340, options.all / f"{scene}-narrow-{theme}.png")
        for error in page.errors:
            print(error)


if __name__ == "__main__":
    main()
