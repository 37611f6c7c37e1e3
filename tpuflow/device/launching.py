"""Checks of a launch: arguments that fit the signature, infeeds with enough items, outfeeds with enough room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.errors import LaunchError
from tpuflow.isa.collectives import whole_shape
from tpuflow.isa.program import Port, Program


def check_arguments(program: Program, inputs: Sequence[Any], infeeds: Sequence[Any]) -> None:
    """Refuse arguments of a launch; inputs: one array a port; infeeds: one stacked array [items, ...] a port.

    Raises:
      LaunchError: their number, or the shape or type of one, does not fit the signature.
    """
    for what, ports, arrays, lead in (("input", program.inputs, inputs, 0), ("infeed", program.infeeds, infeeds, 1)):
        if len(ports) != len(arrays):
            raise LaunchError(f"the program takes {len(ports)} {what} arrays ({[p.name for p in ports]}), got {len(arrays)}.")
        for port, x in zip(ports, arrays, strict=True):
            shape, wanted = x.shape, whole_shape(port.shape, port.cut, program.mesh) if port.cut else port.shape
            if len(shape) != lead + len(wanted) or shape[lead:] != wanted or x.dtype != port.dtype.numpy:
                raise LaunchError(_mismatch(what, port, wanted, x, lead))


def _mismatch(what: str, port: Port, shape: Sequence[int], x: Any, lead: int) -> str:
    items = "[items, ...] of " if lead else ""
    found = f"expected {items}{port.dtype}{list(shape)}, got {x.dtype}{list(x.shape)}"
    return f"{what} {port.name!r}: {found}. A Program is compiled for one shape and type: convert the array, or compile another Program."


def run_dry(ports: Sequence[Port], items: Sequence[int]) -> LaunchError:
    """The error of a program that takes more items than the ports were given."""
    given = ", ".join(f"{p.name!r} {n}" for p, n in zip(ports, items, strict=True))
    return LaunchError(f"an infeed has run dry: the program takes more items than the ports were given ({given}); give them more.")


def check_sent(ports: Sequence[Port], sent: Sequence[int], room: int) -> None:
    """Refuse a launch that sent more outfeed items than there was room for.

    Raises:
      LaunchError: with both numbers.
    """
    for port, n in zip(ports, sent, strict=True):
        if n > room:
            raise LaunchError(f"outfeed {port.name!r}: the program sent {n} items, with room for {room}; say how many with `count`.")
