"""Pages of ours as headless Chromium shows them, and pictures of them, each with the figures that it shows as text inside its file."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=3000")
"""Without a window, and long enough for a page's script to end."""
LIGHT = "--blink-settings=preferredColorScheme=1"
WIDTH, HEIGHT = 1280, 900


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in the browser, with a new profile.

    Raises:
      FileNotFoundError: there is no such browser.
    """
    if BROWSER is None:
        raise FileNotFoundError(f"expected one of {', '.join(BROWSERS)} on PATH. Install Chromium (Debian: apt install chromium).")
    with tempfile.TemporaryDirectory() as profile:
        command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", *options, page.resolve().as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def take(page: Path, picture: Path, text: str) -> None:
    """A picture of the top of a page, in light colors, as PNG with a text as its description."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    browse(page, f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture.resolve()}", LIGHT)
    about = PngInfo()
    about.add_text("Description", text)
    with Image.open(picture) as seen:
        colors = seen.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colors.save(picture, pnginfo=about, optimize=True)


def described(picture: Path) -> str:
    """The text in a picture's file; "" if it has none."""
    from PIL import Image

    with Image.open(picture) as seen:
        return str(seen.info.get("Description", ""))
