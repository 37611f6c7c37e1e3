"""Files made from valid Programs by changing what is in them: fields of the Program, or bytes, mostly with checksums made right again."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import numpy as np

from tests import forging
from tests.mutation import mutate
from tpuflow.device.verify import verify
from tpuflow.errors import ProgramError
from tpuflow.isa import file
from tpuflow.isa.program import Program

HEADER, ROW, DIGEST_BYTES = struct.Struct("<8sHHI"), struct.Struct("<4sQ32s"), 32  # as docs/ISA.md says
PROGRAMS = forging.HAND_BUILT


def flipped(content: bytes, rng: np.random.Generator) -> bytes:
    """One to three bytes changed."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        changed[rng.integers(len(changed))] = rng.integers(256)
    return bytes(changed)


def split(data: bytes) -> dict[bytes, bytes]:
    """Sections of a file, read as the documentation of the format says."""
    *_, count = HEADER.unpack_from(data)
    at = HEADER.size + count * ROW.size + DIGEST_BYTES
    sections = {}
    for name, length, _ in ROW.iter_unpack(data[HEADER.size : HEADER.size + count * ROW.size]):
        sections[name] = data[at : at + length]
        at += length
    return sections


def forge(sections: Mapping[bytes, bytes], lengths: Mapping[bytes, int] | None = None) -> bytes:
    """A file with right checksums whatever its content."""
    rows = (ROW.pack(n, (lengths or {}).get(n, len(c)), hashlib.sha256(c).digest()) for n, c in sections.items())
    head = HEADER.pack(file.MAGIC, file.MAJOR, file.MINOR, len(sections)) + b"".join(rows)
    return head + hashlib.sha256(head).digest() + b"".join(sections.values())


def mutated(rng: np.random.Generator) -> bytes:
    """One file: of ten, seven with fields changed, two with bytes of a section changed, one with bytes changed and no checksum right."""
    program = PROGRAMS[rng.integers(len(PROGRAMS))]
    if rng.random() < 0.5:
        program = forging.fed(program, rng)
    draw = rng.random()
    if draw < 0.7:
        return _fields(program, rng)
    data = file.to_bytes(program.strip())
    if draw < 0.8:
        return _bytes(data, rng)
    sections = split(data)
    name = list(sections)[rng.integers(len(sections))]
    return forge(sections | {name: _bytes(sections[name], rng)})


def _fields(program: Program, rng: np.random.Generator) -> bytes:
    """One to three fields changed; half of the time drawn again a few times until the verifier has nothing against it."""
    tries = 20 if rng.random() < 0.5 else 1
    while True:
        changed = program
        for _ in range(int(rng.choice((1, 1, 1, 2, 3)))):
            changed, _ = mutate(changed, rng)
        try:
            data = file.to_bytes(changed)
            tries -= 1
            if tries > 0:
                verify(changed)
        except ProgramError:  # or no place in a file, like a semaphore -1
            continue
        return data


def _bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, put in or taken out."""
    content = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(content) + 1))
        content[at : at + int(rng.integers(0, 3))] = rng.bytes(int(rng.integers(0, 3)))
    return bytes(content)
