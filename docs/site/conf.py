"""Settings of Sphinx for the documentation site; ``make docs`` uses them on what `docs/site/stage.py` has written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from ipython_pygments_lexers import IPython3Lexer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

project = "monarch_kernel"
author = "The monarch_kernel developers"
copyright = author
release = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]
version = release

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["LICENSE"]
html_extra_path: list[str] = []

# MyST, as GitHub reads the same texts.
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
highlight_language = "none"

# Notebooks are shown as they were executed.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, Any] = {}  # nothing is loaded from other servers
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
nb_merge_streams = True

# Docstrings. A single backtick marks a reference to code, which need not be public.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"
suppress_warnings = ["ref.python"]  # a class that two modules export has two entries

html_theme = "pydata_sphinx_theme"
html_title = "monarch_kernel"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["names.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_search_summary = False  # it would be fetched, which browsers refuse for files
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_exclude = ".linenos, .gp, .go"


_HEADING = re.compile(r"(?m)^(\S.*)\n([=-])\2{2,}$")


def use_rubrics(app: Any, what: str, name: str, object: object, options: object, lines: list[str]) -> None:
    """Make headings in a docstring rubrics, in place, because the labels of headings must be unique and several are equal."""
    lines[:] = _HEADING.sub(r".. rubric:: \1", "\n".join(lines)).split("\n")


def setup(app: Any) -> None:
    """Register the lexer for cells with magics, and what changes docstrings."""
    app.add_lexer("python", IPython3Lexer)
    app.connect("autodoc-process-docstring", use_rubrics)
