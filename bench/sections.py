"""Pages that several commands write, each a section of its own."""

from __future__ import annotations

import re
from pathlib import Path


def put_section(path: Path, title: str, text: str) -> None:
    """Write the section of this title into a page, in the place of an older one if there is one.

    Raises:
      OSError: the page cannot be written.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    new = f"## {title}\n\n{text.strip()}\n"
    old = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    if old is None:
        path.write_text(f"{page.rstrip()}\n\n{new}".lstrip(), encoding="utf-8")
        return
    rest = page[old.end() :]
    path.write_text(page[: old.start()] + new + (f"\n{rest}" if rest else ""), encoding="utf-8")
