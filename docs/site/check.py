"""Check the built site: ``python -m docs.site.check build/docs/html [PAGE]...`` (``make docs-check``).

Links are checked in the files: each leads to a page, and to a place in it. Then Chromium opens all pages from the disk, light
and dark: no page may load anything from elsewhere, log an error, or have a violation that axe-core finds; and the search must
find a page without a server.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

__all__ = ["Links", "broken_links"]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")


class Links(HTMLParser):
    """The links of a page, and the places that links can name.

    Attributes:
        links: all addresses.
        places: all ids.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        values = dict(attrs)
        if name := values.get("id"):
            self.places.add(name)
        for key in ("href", "src"):
            if address := values.get(key):
                self.links.append(address)


def broken_links(site: Path, pages: Mapping[Path, Links]) -> Iterator[str]:
    """Find links to files that do not exist, and to places that their page does not have."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link}: there is no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{path.relative_to(site)}: {link}: the page has no such place"


def _in_browser(site: Path, pages: list[Path]) -> Iterator[str]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})  # type: ignore[arg-type]
            context.add_init_script(
                f"localStorage.setItem('mode', '{scheme}'); localStorage.setItem('theme', '{scheme}')"
            )
            for path in pages:
                found = _tried(context, path)
                if found is None:  # a page may crash where memory is short
                    found = _tried(context, path)
                crashed = ["the page crashed twice"] if found is None else found
                yield from (f"{path.relative_to(site)} ({scheme}): {text}" for text in dict.fromkeys(crashed))
            context.close()
        page = browser.new_page()
        page.goto(f"{(site / 'search.html').as_uri()}?q=rollback")
        try:
            page.wait_for_selector("#search-results li a", timeout=20_000)
        except Exception as error:
            yield f"search.html: it finds nothing for 'rollback': {error}"
        browser.close()


def _tried(context: BrowserContext, path: Path) -> list[str] | None:
    """Open a page, and return what is wrong with it; None if it has crashed."""
    from playwright.sync_api import Error

    page = context.new_page()
    seen: list[str] = []
    page.on("console", lambda message: message.type == "error" and seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: request.url.startswith("http") and seen.append(request.url))
    try:
        page.goto(path.as_uri())
        return [*seen, *(_violations(page) if AXE.is_file() else ())]
    except Error as error:
        if "crashed" not in str(error):
            raise
        return None
    finally:
        page.close()


def _violations(page: Page) -> list[str]:
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run(document, {preload: false, runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")
    return [
        f"axe: {violation['id']}: {violation['help']}: {node['html'][:160]}"
        for violation in found["violations"]
        for node in violation["nodes"][:3]
    ]


def main(arguments: list[str]) -> int:
    """Run the command line: the folder of the site, and the pages to open if not all."""
    site = Path(arguments[0]).resolve()
    paths = sorted(path for path in site.rglob("*.html") if "_static" not in path.relative_to(site).parts)
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in paths}
    found = []
    for line in chain(broken_links(site, pages), _in_browser(site, [site / name for name in arguments[1:]] or paths)):
        found.append(line)
        print(line, file=sys.stderr, flush=True)
    axe = "" if AXE.is_file() else "; without axe-core (npm ci in labextension/)"
    n_links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {n_links} links, light and dark{axe}: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
