"""What is wrong with a part of a Program, before the place is known: raised by rules, placed by the verifier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Refusal(Exception):
    """A rule that does not hold. `instruction` counts over the kernel's three sections, if it is about one."""

    what: str
    instruction: int | None = None
