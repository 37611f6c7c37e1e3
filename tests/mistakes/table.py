"""The table's rows, how a mistake is made, and how its error is written down so that it reads alike on every machine."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tpuflow.cli import main
from train.__main__ import main as train_main

MISTAKES: dict[str, Mistake] = {}
HOME = "/home/you"
"""What stands for the directory a mistake is made in."""
SETTING = Path(__file__).with_name("setting.py")
"""What every mistake begins with."""
SCRIPT = "train.py"
"""What stands for the file a mistake is written in; its lines are counted from the first that is shown."""


class CommandFailed(Exception):
    """A command of the command line ended with another status than 0; the message is what it printed on stderr."""


@dataclass(frozen=True)
class Mistake:
    """A mistake: a function without arguments that makes it, the type of its error, and what the error must say.

    `where`, `found`, `remedy`: parts of its text that answer the three questions: where is it, what was found and expected, what is to
    be done.
    """

    make: Callable[[], Any]
    error: type[BaseException]
    where: str
    found: str
    remedy: str

    @property
    def title(self) -> str:
        """The name of the function, in words."""
        return self.make.__name__.strip("_").replace("_", " ")

    @cached_property
    def code(self) -> str:
        """The function's body."""
        lines, _ = inspect.getsourcelines(self.make)
        return textwrap.dedent("".join(lines[self._first_line - self.make.__code__.co_firstlineno :])).rstrip()

    @property
    def _first_line(self) -> int:
        source = textwrap.dedent(inspect.getsource(self.make))
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        return self.make.__code__.co_firstlineno + function.body[0].lineno - 1

    @cached_property
    def text(self) -> str:
        """The whole text of the error and its notes. A warning counts as an error.

        Raises:
          AssertionError: there is none, or one of another type.
        """
        with _elsewhere() as folder, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("error", RuntimeWarning)
            try:
                self.make()
            except (Exception, SystemExit) as error:
                assert type(error) is self.error, f"{self.title}: expected {self.error.__name__}, got {error!r}"
                return self._everywhere("\n".join([str(error), *getattr(error, "__notes__", ())]), folder)
        raise AssertionError(f"{self.title}: no error")

    def _everywhere(self, text: str, folder: str) -> str:
        """The text without what is this machine's, this file's, or JAX's note on the tracebacks that it shortens."""
        text = text.split("\n--------------------\n")[0] + "".join(f"\n{note}" for note in text.split("include these.\n")[1:])
        line = rf"\S*\b{Path(inspect.getfile(self.make)).name}:(\d+)"
        text = re.sub(line, lambda found: f"{SCRIPT}:{int(found[1]) - self._first_line + 1}", text)
        text = re.sub(rf"\S*\b{SETTING.name}:\d+", SETTING.name, text)
        text = text.replace(os.path.realpath(folder), HOME).replace(folder, HOME)
        return text.replace(f"{self.make.__name__}.<locals>.", "").rstrip()


@contextlib.contextmanager
def _elsewhere() -> Any:
    """Within it, one works in an empty directory, with environment variables of one's own."""
    before, environment = os.getcwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)


def mistake(error: type[BaseException], where: str, found: str, remedy: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter the decorated function into the table."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        row = Mistake(make, error, where, found, remedy)
        assert row.title not in MISTAKES, f"two mistakes are called {row.title!r}"
        MISTAKES[row.title] = row
        return make

    return enter


_CHOICES = re.compile(r"\(choose from [^)]*\)")
"""argparse quotes them in some versions of Python and not in others."""


def command(line: str) -> None:
    """What `tpuflow` does with a command line, without the usage that argparse prints before an error.

    Raises:
      CommandFailed: it failed.
    """
    _run(main, line)


def recipe(line: str) -> None:
    """The same of `python -m train`."""
    _run(train_main, line)


def _run(main: Callable[[list[str]], int], line: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(line.split())
        except SystemExit as end:
            status = end.code
    if status:
        text = said.getvalue().strip()
        text = _CHOICES.sub(lambda found: found[0].replace("'", ""), text)
        raise CommandFailed(text.splitlines()[-1] if text.startswith("usage:") else text)
