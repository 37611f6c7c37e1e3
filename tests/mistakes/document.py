"""`docs/errors.md`: the table as a document."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mistakes import CHAPTERS, MISTAKES
from tests.mistakes.table import HOME, SCRIPT, SETTING, Mistake

INTRODUCTION = """# Errors

What new users get wrong, and what tpuflow says to it. An error says where it is, what was found and what was expected, and what to do.
Errors of tpuflow's own derive from `tpuflow.errors.TpuflowError`; where JAX has an error of its own, it keeps its type.

This file is made by `python -m tests.mistakes > docs/errors.md`; `tests/test_mistakes.py` holds every text to it. Each piece of code is
the file `{script}`, run in the folder `{home}`, after

```python
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpuflow

{setting}
```

`command("...")` is what `tpuflow ...` does in a terminal, and `recipe("...")` what `python -m train ...` does.
"""


def document() -> str:
    """The whole text."""
    setting = SETTING.read_text(encoding="utf-8").partition("import numpy as np\n")[2].strip()
    introduction = INTRODUCTION.format(script=SCRIPT, home=HOME, setting=setting)
    return "\n".join([introduction, *_chapters()])


def section(mistake: Mistake) -> str:
    """A mistake and its error."""
    title = mistake.title[0].upper() + mistake.title[1:]
    return f"### {title}\n\n```python\n{mistake.code}\n```\n\n`{mistake.error.__name__}`:\n\n```text\n{mistake.text}\n```\n"


def _chapters() -> Iterator[str]:
    for chapter in CHAPTERS:
        yield f"## {(chapter.__doc__ or '').strip().rstrip('.')}\n"
        yield from (section(mistake) for mistake in MISTAKES.values() if mistake.make.__module__ == chapter.__name__)
