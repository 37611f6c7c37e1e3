"""Executables on a mesh of devices: buffers hold each device's shard, and the engine, which simulates all chips at once, whole arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuflow.isa.collectives import MeshAxis, whole_shape
from tpuflow.isa.meshes import places
from tpuflow.jaxprs.modules import without_last
from tpuflow.pjrt.buffer import SHARED_BY, arrays_of
from tpuflow.pjrt.cells import Text
from tpuflow.pjrt.device import Device
from tpuflow.pjrt.envelope import ProgramMetadata
from tpuflow.pjrt.executable import Loaded

Piece = tuple[slice, ...]
"""The part of a whole array that a device has."""


class LoadedOnMesh(Loaded):
    """A Program loaded on as many devices as its mesh has chips.

    `metadata.module` is the module that XLA's partitioner made, with its call of `LAST`. A stacked array, of which each device has one of
    its own (an unreduced summand, or a shard in an order of devices that no mesh axis has), has an axis of devices first in the Program.
    """

    def __init__(self, program: Any, metadata: ProgramMetadata, devices: Sequence[Device]):
        super().__init__(program, metadata, devices)
        self._inputs, self._results = ([_owners(p, program.mesh) for p in ports] for ports in (program.inputs, program.outputs))

    def _joined(self, arguments: Sequence[Sequence[int]]) -> list[Any]:
        return [self._join(i, arrays_of(own[i] for own in arguments)) for i in range(len(self._inputs))]

    def _join(self, i: int, pieces: Sequence[Any]) -> Any:
        """The whole array of argument i, from the devices' pieces; if it is replicated, the first device's array."""
        port, owners = self.program.inputs[i], self._inputs[i]
        if len(owners) == 1:
            return pieces[0]
        whole = np.empty(whole_shape(port.shape, port.cut, self.program.mesh), port.dtype.numpy)
        for piece, (first, *_) in owners:
            whole[piece] = np.asarray(pieces[first]).reshape(port.shape)
        return self.device.client.host.moved(whole)

    def _spread(self, results: list[Any]) -> Sequence[Sequence[int]]:
        pieces = [self._cut(i, x) for i, x in enumerate(results)]
        found = [kinds.new(row).handles for kinds, row in zip(self._given, _by_device(pieces, len(self.devices)), strict=True)]
        for i, owners in enumerate(self._results):
            for _, numbers in owners:
                if len(numbers) > 1:
                    SHARED_BY.update(dict.fromkeys([found[number][i] for number in numbers], len(numbers)))
        return found

    def _cut(self, i: int, whole: Any) -> list[Any]:
        """The pieces of result i, one for each device; devices with the same piece share one array."""
        pieces: list[Any] = [whole] * len(self.devices)
        if len(self._results[i]) > 1:
            values = np.asarray(whole)
            for piece, numbers in self._results[i]:
                of_device = values[piece][0] if i in self.metadata.stacked_outputs else values[piece]
                own = self.device.client.host.moved(of_device)
                for number in numbers:
                    pieces[number] = own
        return pieces

    @functools.cached_property
    def optimized(self) -> Text:
        """What each device runs, as MLIR bytecode. JAX reads the shardings of arguments and results from it, where it has not set them."""
        return Text(without_last(self.metadata.module))


def _owners(port: Any, mesh: Sequence[MeshAxis]) -> list[tuple[Piece, list[int]]]:
    """The distinct pieces that a port's array is cut into, each with the numbers of the devices that have it, in ascending order."""
    sizes = {axis.name: axis.size for axis in mesh}
    cut = port.cut or ((),) * len(port.shape)
    along = [places(sizes, [mesh[a].name for a in axes]).tolist() for axes in cut]
    rows = list(zip(*along, strict=True)) if along else [()]
    found: dict[tuple[int, ...], list[int]] = {}
    for device, row in enumerate(rows):
        found.setdefault(row, []).append(device)
    return [(_piece(row, port.shape), numbers) for row, numbers in found.items()]


def _piece(row: Sequence[int], shape: Sequence[int]) -> Piece:
    return tuple(slice(at * length, (at + 1) * length) for at, length in zip(row, shape, strict=True))


def _by_device(pieces: Sequence[Sequence[Any]], devices: int) -> list[list[Any]]:
    return [[row[device] for row in pieces] for device in range(devices)]
