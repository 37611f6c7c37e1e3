"""The host's memory: arrays that a program puts there and takes back keep their bits, leave HBM meanwhile, and cost what the link takes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tests.test_residency import without_a_place
from tpuflow.chips import Chip
from tpuflow.compiler import compile_function, compile_stablehlo
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import time_program
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.verify import verify
from tpuflow.errors import HazardError, ProgramError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.collectives import Await
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import from_bytes, to_bytes
from tpuflow.isa.program import Copy, Kernel, Program, walk
from tpuflow.isa.summary import summary
from tpuflow.reports.profile import profile
from tpuflow.reports.trace import FROM_HOST, TO_HOST, trace
from tpuflow.stages.analysis import memory_analysis

LAYERS, SIZE, CHIP = 4, 16, without_a_place("generic")
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["layer input"], offload_src="device", offload_dst="pinned_host"
)


def _layer(x: Any, w: Any) -> Any:
    x = checkpoint_name(x, "layer input")
    return jnp.tanh(x @ w)


def _net(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and gradients of some layers one after the other."""

    def loss(ws: Any, x: Any) -> Any:
        return (functools.reduce(layer, ws, x) ** 2).sum()

    return jax.value_and_grad(loss)


def _scan(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The same of layers whose weights are stacked, in a loop."""

    def loss(ws: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))[0] ** 2).sum()

    return jax.value_and_grad(loss)


NETS = {"unrolled": _net, "scanned": _scan}
OFFLOADING, PLAIN = _net(jax.checkpoint(_layer, policy=OFFLOADED)), _net(_layer)


def _arguments(dtype: Any = jnp.float32, size: int = SIZE) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    ws = [jnp.asarray(rng.normal(size=(size, size)) / size**0.5, dtype) for _ in range(LAYERS)]
    return ws, jnp.asarray(rng.normal(size=(2 * size, size)), dtype)


def _imported(importer: str, function: Callable[..., Any], arguments: tuple[Any, ...], chip: Chip = CHIP) -> Program:
    if importer == "jaxpr":
        return compile_function(function, arguments, name="net", chip=chip)
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return compile_stablehlo(lowered.as_text(debug_info=True), name="net", chip=chip)


def _run(program: Program, arguments: Any, engine: str, fidelity: str) -> list[bytes]:
    leaves = [np.asarray(a) for a in jax.tree.leaves(arguments)]
    return [np.asarray(x).tobytes() for x in Executable(program, engine=engine, fidelity=fidelity).launch(leaves)[0]]


@pytest.mark.parametrize(
    ("net", "importer", "dtype"),
    [("unrolled", "jaxpr", "f4"), ("unrolled", "stablehlo", "bf16"), ("scanned", "jaxpr", "bf16"), ("scanned", "stablehlo", "f4")],
)
def test_no_bit_depends_on_where_an_array_is(net: str, importer: str, dtype: Any) -> None:
    arguments, layers = (
        _arguments(jnp.dtype(jnp.bfloat16 if dtype == "bf16" else dtype)),
        (jax.checkpoint(_layer, policy=OFFLOADED), _layer),
    )
    offloading, plain = (_imported(importer, NETS[net](layer), arguments) for layer in layers)
    verify(offloading)
    assert offloading.host_bytes == LAYERS * arguments[1].nbytes and not plain.host_bytes
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact")):
        assert _run(offloading, arguments, engine, fidelity) == _run(plain, arguments, engine, fidelity), (engine, fidelity)


@functools.cache
def _large() -> tuple[Program, Program]:
    """Offloading and not, with arrays that are large beside everything else."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((16 * x.shape[0], x.shape[1]) if x.shape[0] > SIZE else x.shape, x.dtype), _arguments()
    )
    offloading, plain = (compile_function(net, shapes, name="net", chip=CHIP) for net in (OFFLOADING, PLAIN))
    return offloading, plain


def _copies(program: Program) -> list[Copy]:
    return [block for _, block in walk(program.code) if isinstance(block, Copy)]


# --- memory and time


def test_hbm_holds_so_much_less() -> None:
    offloading, plain = _large()
    one = next(p for p in offloading.inputs if p.shape[0] > SIZE)
    size = offloading.buffers[one.buffer].bytes
    assert offloading.host_bytes == LAYERS * size
    assert plain.hbm_bytes - offloading.hbm_bytes >= size, "all but those on their way leave HBM"
    assert memory_analysis(offloading).host_temp_size_in_bytes == LAYERS * size and not memory_analysis(plain).host_temp_size_in_bytes
    text = str(profile(offloading, time_program(offloading)).memory)
    assert f"host memory: {LAYERS} arrays lie there, at most {LAYERS * size / 2**20:.2f} MiB at once" in text
    assert f"host memory: {LAYERS} arrays that lie there, {LAYERS * size} bytes" in summary(offloading)


def test_time_has_what_the_link_takes() -> None:
    program, _ = _large()
    found = time_program(program)
    each = program.buffers[_copies(program)[0].target].bytes / CHIP.host_bytes_per_second
    assert len(found.copies) == 2 * LAYERS and all(row.is_host for row in found.copies)
    assert found.device_seconds >= 2 * LAYERS * each * 0.5, "both ways at once, each way one after the other"
    kernels = sum(row.picoseconds for row in found.kernels) / PICOSECONDS
    assert found.device_seconds == pytest.approx(kernels + found.exposed_copy_seconds) and found.exposed_copy_seconds >= each
    assert "copies between HBM and the host 8: " in found.summary()
    drawn = [e for e in trace(profile(program, found), 1)["traceEvents"] if e["ph"] == "X"]
    assert all(sum(e.get("tid") == row for e in drawn) == LAYERS for row in (TO_HOST, FROM_HOST))


def test_kernels_hide_a_copy() -> None:
    """A slow chip with a fast link: only the last array is waited for, which is wanted at once."""
    slow = replace(CHIP, clock_hz=CHIP.clock_hz / 1000, hbm_bytes_per_second=CHIP.hbm_bytes_per_second / 1000)
    rows = time_program(replace(_imported("jaxpr", OFFLOADING, _arguments(size=64), slow))).copies
    exposed = [row for row in rows if row.exposed_picoseconds]
    assert len(exposed) <= 2, [(r.place, r.exposed_picoseconds) for r in rows]


def test_a_loop_puts_items_there_and_takes_them_back() -> None:
    """The first before the loop, and that of the next trip in each."""
    program = compile_function(_scan(jax.checkpoint(_layer, policy=OFFLOADED)), _arguments(), chip=CHIP)
    copies = {place: copy for place, copy in walk(program.code) if isinstance(copy, Copy)}
    assert ["body" in place for place in copies] == [True, False, True] and all(copy.index >= 0 for copy in copies.values())
    assert [row.count for row in time_program(program).copies] == [LAYERS, 1, LAYERS]
    assert from_bytes(to_bytes(program)).code == program.code
    assert [c for _, c in walk(assemble(disassemble(program)).code) if isinstance(c, Copy)] == list(copies.values())


def test_an_item_comes_while_the_trip_before_it_runs() -> None:
    """On a slow chip with a fast link nothing is waited for but the first item; where memory has no room for one more, each trip begins
    with a wait."""
    slow = replace(CHIP, clock_hz=CHIP.clock_hz / 10, hbm_bytes_per_second=CHIP.hbm_bytes_per_second / 10)
    function, arguments = _scan(jax.checkpoint(_layer, policy=OFFLOADED)), _arguments(size=512)
    roomy = compile_function(function, arguments, chip=slow)
    tight = compile_function(function, arguments, chip=replace(slow, hbm_bytes=roomy.hbm_bytes))
    fetched = [[row for row in time_program(program).copies if row.ends[0] == "host"] for program in (roomy, tight)]
    assert [[row.count for row in rows] for rows in fetched] == [[1, LAYERS], [LAYERS]]
    assert fetched[0][1].exposed_picoseconds < fetched[1][0].exposed_picoseconds / 10


@pytest.mark.parametrize("form", ["unroll", "within a loop", "stacked for the program", "read in a loop"])
def test_forms_of_loops(form: str) -> None:
    """No warning, and as many bytes at the host as are asked for."""
    layer = jax.checkpoint(_layer, policy=OFFLOADED)
    ws, x = jnp.zeros((LAYERS, SIZE, SIZE)), jnp.zeros((2 * SIZE, SIZE))

    def grads(ws: Any, x: Any, unroll: int = 1) -> Any:
        return jax.grad(lambda ws: jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws, unroll=unroll)[0].sum())(ws)

    def stacked(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, jax.device_put(x, jax.memory.Space.Host)), x, ws)

    def read(ws: Any, x: Any) -> Any:
        h = jax.device_put(x * 2, jax.memory.Space.Host)
        return jax.lax.scan(lambda x, w: (x @ w + jax.device_put(h, jax.memory.Space.Device), None), x, ws)[0]

    forms = {
        "unroll": (functools.partial(grads, unroll=2), LAYERS),
        "within a loop": (lambda ws, x: jax.lax.fori_loop(0, 3, lambda _, ws: grads(ws, x), ws), LAYERS),
        "stacked for the program": (stacked, LAYERS),
        "read in a loop": (read, 1),
    }
    function, arrays = forms[form]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile_function(function, (ws, x), chip=CHIP)
    verify(program)
    assert program.host_bytes == arrays * x.nbytes


# --- form


def test_bytes_and_text_keep_it() -> None:
    program, _ = _large()
    assert from_bytes(to_bytes(program)).buffers == program.buffers == assemble(disassemble(program)).buffers
    assert from_bytes(to_bytes(program)).code == program.code


def test_an_output_may_be_at_the_host() -> None:
    program = compile_function(
        lambda x: (jax.device_put(x * 2, jax.memory.Space.Host), x + 1), (np.arange(6.0, dtype=np.float32),), chip=CHIP
    )
    assert [program.buffers[p.buffer].space for p in program.outputs] == ["host", "hbm"]
    for engine in ("reference", "fast"):
        first, second = Executable(program, engine=engine).launch([np.arange(6.0, dtype=np.float32)])[0]
        assert list(np.asarray(first)) == [0, 2, 4, 6, 8, 10] and list(np.asarray(second)) == [1, 2, 3, 4, 5, 6]
    assert memory_analysis(program).host_output_size_in_bytes == 24


def test_pieces_of_arrays_are_put_there_by_every_chip_of_a_mesh() -> None:
    """XLA's partitioner hands on what is said of memory."""
    mesh, arguments = AbstractMesh((4,), ("data",)), _arguments()
    net = _scan(jax.checkpoint(_layer, policy=OFFLOADED))
    cut = NamedSharding(mesh, PartitionSpec("data"))
    program = compile_function(lambda ws, x: net(ws, jax.lax.with_sharding_constraint(x, cut)), arguments, chip=CHIP)
    verify(program)
    assert program.mesh[0].size == 4 and program.host_bytes == LAYERS * arguments[1].nbytes / 4


# --- what is refused or said


def _read_at_the_host(x: Any) -> Any:
    return jax.device_put(jnp.cumsum(jax.device_put(x * 2, jax.memory.Space.Host)), jax.memory.Space.Device)


def test_what_does_not_stay_at_the_host_is_said() -> None:
    with pytest.warns(UserWarning, match=r"test_host_memory.py:\d+.*1 array of 0.00 MiB that should be in the host's memory is in HBM"):
        program = compile_function(_read_at_the_host, (np.ones(6, np.float32),), chip=CHIP)
    assert not program.host_bytes and not _copies(program)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_either_kind_of_the_hosts_memory_is_at_the_host(kind: str) -> None:
    there = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=kind)
    program = compile_function(lambda x: jax.device_put(x * 2, there), (np.ones(6, np.float32),), chip=CHIP)
    assert [program.buffers[p.buffer].space for p in program.outputs] == ["host"]


def test_nothing_is_said_where_arrays_do() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_function(OFFLOADING, _arguments(), chip=CHIP)


def _late() -> Program:
    """A fetch is awaited after its first reader."""
    program = compile_function(OFFLOADING, _arguments(), chip=CHIP)
    code, targets = list(program.code), {c.semaphore: c.target for c in _copies(program)}
    at = max(i for i, block in enumerate(code) if isinstance(block, Await))
    assert isinstance(code[at + 1], Kernel) and program.buffers[targets[code[at].semaphore]].space == "hbm"
    code[at : at + 2] = code[at + 1], code[at]
    return replace(program, code=tuple(code))


def test_a_wait_that_comes_too_late_is_found() -> None:
    program = _late()
    with pytest.raises(ProgramError, match=r"reads what has not arrived yet from copy \d+ .*expected an await of semaphore \d+ before it"):
        verify(program)
    with pytest.raises(HazardError, match=r"reads what has not arrived yet in buffer \d+"):
        ReferenceEngine(program, verify=False).launch([np.asarray(a) for a in jax.tree.leaves(_arguments())])


def test_an_item_that_there_is_not_is_found() -> None:
    program = compile_function(_scan(jax.checkpoint(_layer, policy=OFFLOADED)), _arguments(), chip=CHIP)
    buffers = [replace(b, shape=(b.shape[0] - 1, *b.shape[1:])) if b.space == "host" else b for b in program.buffers]
    with pytest.raises(HazardError, match=r"asks for item 3; expected one of the 3 at the host"):
        leaves = [np.asarray(a) for a in jax.tree.leaves(_arguments())]
        ReferenceEngine(replace(program, buffers=tuple(buffers)), verify=False).launch(leaves)
    with pytest.raises(ProgramError, match="copies an item from buffer .*expected one along the first axis of what is at the host"):
        verify(replace(program, buffers=tuple(replace(b, shape=b.shape[1:]) if b.space == "host" else b for b in program.buffers)))


def test_a_kernel_does_not_reach_the_host() -> None:
    program = compile_function(lambda x: jnp.sort(jnp.sort(x, 0), 1), (np.ones((8, 8), np.float32),), chip=CHIP)
    between = next(n for n, b in enumerate(program.buffers) if n not in {p.buffer for p in (*program.inputs, *program.outputs)})
    buffers = tuple(replace(b, space="host") if n == between else b for n, b in enumerate(program.buffers))
    with pytest.raises(ProgramError, match=f"buffer {between} is at the host; expected it in hbm or on the chip"):
        verify(replace(program, buffers=buffers))
