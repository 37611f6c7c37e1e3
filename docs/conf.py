"""Sphinx's configuration: `make docs` builds the pages of this folder, with the README as the first one, into build/docs."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import tpuflow

project, author, release = "tpuflow", "the tpuflow developers", tpuflow.__version__
copyright = f"{author}, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]

html_theme, html_title = "furo", f"tpuflow {release}"
html_copy_source, html_show_sourcelink = False, False
html_static_path, html_css_files = ["_static"], ["wide.css"]
highlight_language, pygments_style, pygments_dark_style = "text", "friendly", "monokai"

nb_execution_mode, nb_execution_timeout = "force", 1200
nb_execution_raise_on_error = True
nb_execution_show_tb = True
"""Notebooks lie here without outputs; each build runs them."""

myst_heading_anchors = 4
"""Headings down to this level are places of links, named by GitHub's rule."""

autodoc_member_order, autodoc_typehints_format, autodoc_class_signature = "alphabetical", "short", "mixed"

ITEM = re.compile(r"(\w[\w, ]*): ")
MARKUP = re.compile(r"`(?P<code>[^`]*)`(?P<following>\w?)|(?P<other>(?<=.)[*|]|_\b)")


def in_restructured_text(docstring: list[str]) -> list[str]:
    """The lines of a docstring of this project, which is plain text with `code`, "name: what it is" and indented examples."""
    found: list[str] = []
    for blank, lines in groupby(docstring, lambda line: not line.strip()):
        block = [""] if blank else list(lines)
        if all(line.startswith("    ") for line in block):
            found += ["::", "", *block]
        elif found and all(line.startswith("  ") or ITEM.match(line) for line in block):
            found += [ITEM.sub(r"* **\1**: ", line) for line in _marked(block)]
        else:
            found += _marked(block)
    return found


def _marked(block: list[str]) -> list[str]:
    """`code` as ``code``; what means something else in reStructuredText is escaped, except for the stars of a list."""
    return MARKUP.sub(_escaped, "\n".join(block)).split("\n")


def _escaped(found: re.Match[str]) -> str:
    code, following, other = found["code"], found["following"], found["other"]
    return f"\\{other}" if code is None else f"``{code}``\\ {following}" if following else f"``{code}``"


def rewrite(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """What Sphinx calls with every docstring."""
    lines[:] = in_restructured_text(lines)


def setup(app: Any) -> None:
    """Docstrings are rewritten before napoleon reads their sections."""
    app.connect("autodoc-process-docstring", rewrite, priority=400)
