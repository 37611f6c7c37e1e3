"""The reader of XLA:TPU's schedules and the comparison, on text made here: libtpu is no dependency."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpuflow
from tpuflow import cli
from tpuflow.comparing import comparing, vendor
from tpuflow.comparing.collectives import vendor_collectives
from tpuflow.comparing.comparison import KernelCosts, LayerRow, Work, explanation
from tpuflow.comparing.hlo import Array, Module, Space, parse
from tpuflow.comparing.traffic import Moved, moved
from tpuflow.comparing.trips import with_trips
from tpuflow.errors import ConfigError
from tpuflow.estimating.estimating import estimate

TEXT = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/home/me/step.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%product (p.0: f32[64,128], p.1: f32[128,256]) -> f32[64,256] {
  %p.0 = f32[64,128]{1,0:T(8,128)S(1)} parameter(0)
  %p.1 = f32[128,256]{1,0:T(8,128)} parameter(1)
  ROOT %dot.1 = f32[64,256]{1,0:T(8,128)} convolution(%p.0, %p.1), dim_labels=bf_io->bf
}

%cut (p.2: f32[16,256], p.3: s32[]) -> f32[1,256] {
  %p.3 = s32[]{:T(128)} parameter(1)
  %p.2 = f32[16,256]{1,0:T(8,128)} parameter(0)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %row.1 = f32[1,256]{1,0:T(1,128)} dynamic-slice(%p.2, %p.3, %zero.1), dynamic_slice_sizes={1,256}
}

%changed (p.4: f32[16,256], p.5: f32[1,256], p.6: s32[]) -> f32[16,256] {
  %p.4 = f32[16,256]{1,0:T(8,128)} parameter(0)
  %p.5 = f32[1,256]{1,0:T(1,128)} parameter(1)
  %p.6 = s32[]{:T(128)} parameter(2)
  %zero.2 = s32[]{:T(128)} constant(0)
  ROOT %new.1 = f32[16,256]{1,0:T(8,128)} dynamic-update-slice(%p.4, %p.5, %p.6, %zero.2)
}

%body (state: (s32[], f32[16,256])) -> (s32[], f32[16,256]) {
  %state = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %rows = f32[16,256]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %row = f32[1,256]{1,0:T(1,128)S(1)} fusion(%rows, %i), kind=kLoop, calls=%cut, metadata={op_name="jit(step)/while/body/decoder/cut"}
  %after = f32[16,256]{1,0:T(8,128)} fusion(%rows, %row, %i), kind=kLoop, calls=%changed, metadata={op_name="jit(step)/while/body/decoder/set"}
  ROOT %next = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}) tuple(%i, %after)
}

%condition (state.1: (s32[], f32[16,256])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}) parameter(0)
  ROOT %more = pred[]{:T(512)} constant(true)
}

ENTRY %main (x: f32[64,128], w: f32[128,256], rows.1: f32[16,256]) -> (f32[64,256], f32[16,256]) {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0), metadata={op_name="x[\\'a\\']"}
  %w = f32[128,256]{1,0:T(8,128)} parameter(1)
  %rows.1 = f32[16,256]{1,0:T(8,128)} parameter(2)
  %start = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %done = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %dot = f32[64,256]{1,0:T(8,128)} fusion(%done, %w), kind=kOutput, calls=%product, metadata={op_name="jit(step)/jvp(M)/fc1/dot_general" stack_frame_id=1}, backend_config={"window_config":{"estimated_cycles":"3000","cost_model_type":"COST_MODEL_TYPE_CLASSIC"},"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"1024"}]}
  %none = s32[]{:T(128)} constant(0)
  %all = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}) tuple(%none, %rows.1)
  %loop = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}) while(%all), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %rows.2 = f32[16,256]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  ROOT %both = (f32[64,256]{1,0:T(8,128)}, f32[16,256]{1,0:T(8,128)}) tuple(%dot, %rows.2)
}
"""  # noqa: E501

ROW, WEIGHTS, INPUT, PRODUCT = 256 * 4, 128 * 256 * 4, 64 * 128 * 4, 64 * 256 * 4


@pytest.fixture(scope="module")
def module() -> Module:
    return parse(TEXT)


def test_instructions_have_spaces_sources_cycles_and_what_they_work_in(module: Module):
    dot = module.op("main", "dot")
    assert (dot.opcode, dot.operands, dot.cycles, dot.vmem) == ("fusion", ("done", "w"), 3000, 1024)
    assert (dot.scope, dot.source) == ("jit(step)/jvp(M)/fc1/dot_general", "/home/me/step.py:7")
    assert [(a.bytes, a.space) for a in module.op("main", "start").results[:2]] == [(INPUT, 1), (INPUT, 0)]
    assert module.op("main", "x").scope == "x['a']"


def test_the_schedule_counts_the_trips_of_loops(module: Module):
    assert [(op.name, times) for _, op, times in module.scheduled()] == [("start", 1), ("done", 1), ("dot", 1), ("row", 5), ("after", 5)]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("main", "start"), Moved(prefetched=INPUT)),
        (("main", "done"), Moved()),
        (("main", "dot"), Moved(hbm=WEIGHTS + PRODUCT, vmem=INPUT)),
        (("body", "row"), Moved(hbm=ROW + 4, vmem=ROW)),
        (("body", "after"), Moved(hbm=ROW + 4, vmem=ROW)),
    ],
)
def test_what_an_instruction_moves(module: Module, place: tuple[str, str], expected: Moved):
    """Of an operand that is cut and of a result that is changed in place the piece counts (and here the index, four bytes)."""
    assert moved(module, place[0], module.op(*place)) == expected


PADDED = """HloModule jit_padded, is_scheduled=true

ENTRY %main (x: {array}) -> {array} {{
  %x = {array} parameter(0)
  ROOT %y = {array} negate(%x)
}}
"""


@pytest.mark.parametrize(
    ("array", "padded"),
    [
        ("f32[32,56,56,64]{3,0,2,1:T(8,128)}", 32 * 56 * 56 * 128 * 4),
        ("bf16[128,56,56,64]{0,3,2,1:T(8,128)(2,1)}", 128 * 56 * 56 * 64 * 2),
        ("bf16[3,200]{1,0:T(8,128)(2,1)}", 8 * 256 * 2),
        ("f32[100]{0:T(256)}", 256 * 4),
        ("f32[3,200]{1,0:T(8,128)S(1)}", 3 * 200 * 4),
        ("f32[3,200]{1,0}", 3 * 200 * 4),
        ("f32[0,200]{1,0:T(8,128)}", 0),
        ("f32[]{:T(128)}", 4),
    ],
)
def test_layouts_pad_what_does_not_fill_their_tiles(array: str, padded: int):
    """In HBM; what stays on the chip is not counted."""
    found = moved(parse(PADDED.format(array=array)), "main", parse(PADDED.format(array=array)).op("main", "y"))
    plain = found.hbm + found.vmem
    assert found.padding == 2 * padded - plain


SPACES = """HloModule jit_spaces, is_scheduled=true

ENTRY %main (x: f32[64,128], y: f32[8,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %y = f32[8,128]{1,0:T(8,128)S(5)} parameter(1)
  %kept.start = (f32[64,128]{1,0:T(8,128)S(3)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %kept = f32[64,128]{1,0:T(8,128)S(3)} copy-done(%kept.start)
  %come.start = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%y)
  %come = f32[8,128]{1,0:T(8,128)} copy-done(%come.start)
  %near.start = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)S(3)}, u32[]{:S(2)}) copy-start(%kept)
  %near = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%near.start)
  %same.start = (f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %same = f32[64,128]{1,0:T(8,128)} copy-done(%same.start)
  %which = s32[16]{0:T(128)S(4)} custom-call(%come), custom_call_target="which"
  %first = s32[]{:T(128)S(6)} custom-call(%which, %y), custom_call_target="first"
  %flag = u32[]{:S(2)} custom-call(), custom_call_target="flag"
  ROOT %out = f32[64,128]{1,0:T(8,128)} custom-call(%kept, %near, %same, %first, %flag), custom_call_target="out"
}
"""
GUEST, INDICES, NUMBER = 8 * 128 * 4, 16 * 4, 4
OFFLOADED = """HloModule jit_offloaded, is_scheduled=true

%taken (p: f32[1000,128], n: s32[16]) -> f32[16,128] {
  %p = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %n = s32[16]{0:T(128)} parameter(1)
  ROOT %rows = f32[16,128]{1,0:T(8,128)} custom-call(%p, %n), custom_call_target="x"
}, execution_thread="sparsecore"

%added (q: f32[1000,128], m: s32[16], u: f32[16,128]) -> f32[1000,128] {
  %q = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %m = s32[16]{0:T(128)} parameter(1)
  %u = f32[16,128]{1,0:T(8,128)} parameter(2)
  ROOT %sums = f32[1000,128]{1,0:T(8,128)} custom-call(%q, %m, %u), custom_call_target="x"
}, execution_thread="sparsecore"

ENTRY %main (x: f32[1000,128], i: s32[16]) -> f32[1000,128] {
  %x = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %i = s32[16]{0:T(128)} parameter(1)
  %g = ((), (), (s32[99]{0:T(128)}, s32[4]{0:T(1)S(11)}, s32[4]{0:S(10)})) async-start(), \
async_execution_thread="sparsecore", calls=%taken, metadata={op_name="jit(f)/take/gather"}
  %g.update = ((f32[1000,128]{1,0:T(8,128)}, s32[16]{0:T(128)}), f32[16,128]{1,0:T(8,128)}, (s32[99]{0:T(128)})) async-update(%g, %x, %i)
  %g.done = f32[16,128]{1,0:T(8,128)} async-done(%g.update), metadata={op_name="jit(f)/take/gather"}
  %s = ((f32[1000,128]{1,0:T(8,128)}, s32[16]{0:T(128)}, f32[16,128]{1,0:T(8,128)}), f32[1000,128]{1,0:T(8,128)}, u32[]{:S(8)}) \
async-start(%x, %i, %g.done), async_execution_thread="sparsecore", calls=%added, metadata={op_name="jit(f)/add/scatter-add"}
  ROOT %s.done = f32[1000,128]{1,0:T(8,128)} async-done(%s), metadata={op_name="jit(f)/add/scatter-add"}
}
"""
ROWS = 16 * 128 * 4


# --- products in blocks


def _product(iterations: str, *, rows: int = 4096, space: str = "", kernel: str = "128,4", summed: int = 1024) -> Module:
    """bf16[rows,1024] x bf16[1024,4096] with a bias and a residual, in blocks of 512 rows and as many columns."""
    windows = f'"input_window_bounds":["64","{summed // 128}"],"kernel_window_bounds":[{_quoted(kernel)}],"output_window_bounds":["64","4"]'
    config = f'{{"window_config":{{{windows},"iteration_bounds":[{_quoted(iterations)}]}}}}'
    x, w, r = (
        f"bf16[{rows},1024]{{1,0:T(8,128)(2,1){space}}}",
        "bf16[1024,4096]{1,0:T(8,128)(2,1)}",
        f"bf16[{rows},4096]{{1,0:T(8,128)(2,1)}}",
    )
    text = f"""HloModule jit_step

%blocks (a: bf16[{rows},1024], b: bf16[1024,4096], c: bf16[4096], d: bf16[{rows},4096], e: bf16[1024]) -> bf16[{rows},4096] {{
  %d = {r} parameter(3)
  %e = bf16[1024]{{0:T(1024)(128)(2,1)}} parameter(4)
  %a = {x} parameter(0)
  %b = {w} parameter(1)
  %c = bf16[4096]{{0:T(1024)(128)(2,1)}} parameter(2)
  %wide = {x} broadcast(%e), dimensions={{1}}
  %scaled = {x} multiply(%a, %wide)
  %dot = {r} convolution(%scaled, %b), dim_labels=bf_io->bf
  %bias = {r} broadcast(%c), dimensions={{1}}
  %biased = {r} add(%dot, %bias)
  ROOT %sum = {r} add(%biased, %d)
}}

ENTRY %main (x: bf16[{rows},1024], w: bf16[1024,4096], bias: bf16[4096], r: bf16[{rows},4096], s: bf16[1024]) -> bf16[{rows},4096] {{
  %x = {x} parameter(0)
  %w = {w} parameter(1)
  %bias = bf16[4096]{{0:T(1024)(128)(2,1)}} parameter(2)
  %r = {r} parameter(3)
  %s = bf16[1024]{{0:T(1024)(128)(2,1)}} parameter(4)
  ROOT %y = {r} fusion(%x, %w, %bias, %r, %s), kind=kOutput, calls=%blocks, backend_config={config}
}}
"""
    return parse(text)


def _quoted(numbers: str) -> str:
    return ",".join(f'"{n}"' for n in numbers.split(","))


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"iterations": "8,8,1"}, (8, 1)),  # both are as large: features are the outer loop
        ({"iterations": "8,2,1", "rows": 1024}, (1, 2)),  # the weights once more are less than the rows seven times more
        ({"iterations": "8,2,1", "rows": 1024, "space": "S(1)"}, (8, 1)),  # but not if the rows are in VMEM
        ({"iterations": "8,1,1", "rows": 512}, (1, 1)),
        ({"iterations": "8,8,2", "summed": 512, "kernel": "64,4"}, (8, 8)),  # what is summed changes the blocks of both
        ({"iterations": "8,2,1"}, (1, 1)),  # there are 8 blocks of rows, so the loops are others than thought
        ({"iterations": "4,8,1"}, (1, 1)),
        ({"iterations": "8,8,1,1"}, (1, 1)),
    ],
)
def test_a_product_in_blocks_reads_operands_again(options: dict[str, Any], times: tuple[int, int]):
    module = _product(**options)
    rows = options.get("rows", 4096)
    x, w, others = 2 * rows * 1024 * times[0], 2 * 1024 * 4096 * times[1], 2 * (2 * rows * 4096 + 4096 + 1024)
    inside = {"vmem": x} if "space" in options else {}
    assert moved(module, "main", module.op("main", "y")) == Moved(hbm=x + w + others - sum(inside.values()), **inside)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kept.start", Moved(prefetched=INPUT)),
        ("come.start", Moved(prefetched=GUEST, host=GUEST)),
        ("near.start", Moved()),
        ("same.start", Moved(prefetched=2 * INPUT)),
        ("which", Moved(hbm=GUEST, smem=INDICES)),
        ("first", Moved(host=GUEST, smem=INDICES + NUMBER)),
        ("flag", Moved()),
        ("out", Moved(hbm=2 * INPUT, vmem=INPUT, cmem=INPUT, smem=NUMBER)),
    ],
)
def test_every_memory_space_counts_as_what_it_is(name: str, expected: Moved):
    """CMEM, SMEM with the scalars beside it, and the host's memory as well as HBM and VMEM; a semaphore is no data."""
    found = parse(SPACES)
    assert moved(found, "main", found.op("main", name)) == expected
    assert found.op("main", "kept").results == (Array(INPUT, Space.CMEM),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("g", 0), ("g.update", 2 * ROWS + INDICES), ("g.done", 0), ("s", 3 * ROWS + INDICES), ("s.done", 0)],
)
def test_what_a_sparse_core_is_given_counts_once_and_of_a_table_the_rows(name: str, expected: int):
    module = parse(OFFLOADED)
    found = moved(module, "main", module.op("main", name))
    assert (found.hbm, found.prefetched, found.vmem) == (expected, 0, 0)


def test_totals_name_the_memories_that_either_side_uses():
    """On tpu-v4 what we keep on the chip is in CMEM too, and not said to be in VMEM."""
    theirs = vendor.Compiled(parse(SPACES), argument_bytes=0, temp_bytes=0, topology=vendor.Topology("v4:2x2x1", 2))
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = comparing.compared(estimate(lambda x: jnp.sort(jnp.dot(x, x)) @ x, shape, chip="tpu-v4"), theirs)
    assert (found.theirs.costs.cmem_bytes, found.theirs.costs.host_bytes) == (INPUT, 2 * GUEST)
    assert found.ours.costs.cmem_bytes > 0 == found.ours.costs.vmem_bytes
    text = str(found)
    assert all(row in text for row in ("kept in VMEM", "kept in CMEM", "to and from the host"))
    assert found.theirs.costs.smem_bytes == 2 * (INDICES + NUMBER) and "SMEM" not in text, "few bytes are in the JSON only"
    plain = vendor.Compiled(parse(SPACES.replace("S(3)", "S(1)")), argument_bytes=0, temp_bytes=0, topology=vendor.Topology("v5e:2x2"))
    assert "CMEM" not in str(comparing.compared(estimate(jnp.sin, shape, chip="tpu-v5e"), plain))


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ConfigError, match="no ENTRY computation"):
        parse("HloModule nothing\n")


def test_a_loop_of_unknown_length_is_said_and_counts_once():
    found = parse(TEXT.replace(', backend_config={"known_trip_count":{"n":"5"}}', ""))
    assert found.uncounted == 1
    assert [times for _, op, times in found.scheduled() if op.name == "row"] == [1]
    function, shape = jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32)
    theirs = vendor.Compiled(found, argument_bytes=0, temp_bytes=0, topology=vendor.Topology("v5e:2x2"))
    assert "1 loops of XLA:TPU's have an unknown length" in str(comparing.compared(estimate(function, shape, chip="tpu-v5e"), theirs))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("f32[128,256]{1,0:T(8,128)} parameter(1)", "f31[128,256] parameter(1)", "arrays of f31"),
        ("f32[128,256]{1,0:T(8,128)} parameter(1)", "f32[128,256]{1,0:T(8,128)S(7)} parameter(1)", "memory space 7, .* 0 HBM, 1 VMEM"),
        ('{"window_config"', "{window", "no JSON"),
    ],
)
def test_what_cannot_be_read_is_an_error(old: str, new: str, match: str):
    assert old in TEXT
    with pytest.raises(ConfigError, match=match):
        parse(TEXT.replace(old, new))


def test_comparison_puts_the_largest_difference_first_and_moves_with_their_readers(module: Module, tmp_path):
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("fc1"):
            return x @ w

    shapes = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    theirs = vendor.Compiled(module, argument_bytes=INPUT + WEIGHTS, temp_bytes=0, topology=vendor.Topology("v5e:2x2"))
    found = comparing.compared(estimate(step, *shapes, chip="tpu-v5e"), theirs)
    layers = {(row.layer, row.phase): row for row in found.layers}
    assert {"fc1", "M/fc1", "decoder"} == {row.layer for row in found.layers}
    assert [abs(row.difference) for row in found.layers] == sorted((abs(row.difference) for row in found.layers), reverse=True)
    product = next(row for (layer, _), row in layers.items() if layer == "M/fc1")
    assert {work.what for work in product.theirs} == {"start", "dot"}
    assert found.theirs.costs.hbm_bytes == INPUT + WEIGHTS + PRODUCT + 5 * 2 * (ROW + 4)
    assert found.theirs.costs.prefetched_bytes == INPUT
    assert found.theirs.costs.kernels == 11
    assert found.theirs.costs.product_seconds == 3000 / tpuflow.get_chip("tpu-v5e").clock_hz
    text = str(found)
    assert "tpuflow beside XLA:TPU" in text
    assert "moved while others run  start" in text
    found.to_json(tmp_path / "comparison.json")
    assert json.loads((tmp_path / "comparison.json").read_text())["theirs"]["costs"]["kernels"] == 11


def test_our_copies_count_as_the_vendors_do(module: Module):
    def step(x: jax.Array) -> list[jax.Array]:
        with jax.named_scope("ordered"):
            ordered = jnp.sort(x, axis=1)
        with jax.named_scope("sums"):
            return [ordered, jnp.cumsum(ordered, axis=1).max(0), jnp.sort(x, axis=0).sum(0), jnp.cumsum(x, axis=0).max(0)]

    ours = estimate(step, jax.ShapeDtypeStruct((512, 1024), jnp.float32), chip="tpu-v5e")
    theirs = vendor.Compiled(module, argument_bytes=0, temp_bytes=0, topology=vendor.Topology("v5e:2x2"))
    found = comparing.compared(ours, theirs)
    assert found.ours.costs.prefetched_bytes == ours.time.copied_bytes > 0
    assert found.ours.costs.hbm_bytes == ours.time.work.hbm_bytes
    copied = {(row.layer, one.what) for row in found.layers for one in row.ours if one.costs.prefetched_bytes}
    assert copied == {("ordered", "copy vmem to hbm"), ("ordered", "copy hbm to vmem")}, "in the layer of the first kernel on them"


def _row(ours: KernelCosts, theirs: KernelCosts) -> LayerRow:
    return LayerRow("fc1", "forward", (Work("dot", "a.py:1", ours),), (Work("fusion", "", theirs),))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (KernelCosts(2, 5_000_000), KernelCosts(2, 1_000_000, vmem_bytes=4_000_000),
         "4.00 MB more than XLA:TPU; XLA:TPU reads and writes 4.00 MB more on the chip"),
        (KernelCosts(1, 1_000_000), KernelCosts(3, 2_000_000),
         "1.00 MB less than XLA:TPU; XLA:TPU has 3 kernels, tpuflow 1, so that more goes between them through HBM"),
        (KernelCosts(1, 1_000_000), KernelCosts(),
         "1.00 MB more than XLA:TPU; XLA:TPU moves nothing here: what it reads came before, or stays on the chip, or is in another layer"),
        (KernelCosts(1, 1_000_000), KernelCosts(2, 1_000_000), "as much as XLA:TPU"),
        (KernelCosts(1, 3_000_000), KernelCosts(1, 1_000_000),
         "2.00 MB more than XLA:TPU; kernels of tpuflow read more of it again, or hold it in wider types"),
    ],
)  # fmt: skip
def test_a_difference_has_a_cause(ours: KernelCosts, theirs: KernelCosts, expected: str):
    assert explanation(_row(ours, theirs)) == expected


def test_layers_that_are_alike_are_one_row_of_the_text(module: Module):
    def stack(x: jax.Array) -> jax.Array:
        for i in range(3):
            with jax.named_scope(f"h_{i}"):
                x = jnp.dot(x, x)
        return x

    theirs = vendor.Compiled(module, argument_bytes=0, temp_bytes=0, topology=vendor.Topology("v3:2x2", 2))
    found = comparing.compared(estimate(stack, jax.ShapeDtypeStruct((256, 256), jnp.float32), chip="tpu-v3"), theirs)
    assert "h_* (3 alike)" in str(found)
    assert "one device, of which 2 are a chip" in str(found)
    assert {"h_0", "h_1", "h_2"} < {row["layer"] for row in found.as_dict()["layers"]}


ON_CHIPS = """HloModule jit_step, is_scheduled=true, num_partitions=16

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_and_b = f32[] add(%a, %b)
}

%begun (p.0: bf16[64]) -> (bf16[64], bf16[1024]) {
  %p.0 = bf16[64]{0} parameter(0)
  ROOT %gathered.0 = bf16[1024]{0} all-gather(%p.0), replica_groups=mesh['x'=4,'y'=4] {'x','y'}, frontend_attributes={chain_id="7"}
}

%beside (p.1: bf16[64], p.2: f32[64]) -> (f32[64], bf16[1024]) {
  %p.1 = bf16[64]{0} parameter(0)
  %p.2 = f32[64]{0} parameter(1)
  %gathered.1 = bf16[1024]{0} all-gather(%p.1), replica_groups=mesh['x'=4,'y'=4] {'x','y'}, frontend_attributes={chain_id="7"}
  %twice = f32[64]{0} add(%p.2, %p.2)
  ROOT %both = (f32[64]{0}, bf16[1024]{0}) tuple(%twice, %gathered.1)
}

%scattered (p.3: f32[64], p.4: s32[]) -> f32[16] {
  %p.3 = f32[64]{0} parameter(0)
  %p.4 = s32[] parameter(1)
  %total = f32[64]{0} all-reduce(%p.3), replica_groups=[4,4]<=[16], to_apply=%sum
  ROOT %own = f32[16]{0} dynamic-slice(%total, %p.4), dynamic_slice_sizes={16}
}

%trip (state: (u32[], f32[64])) -> (u32[], f32[64]) {
  %state = (u32[], f32[64]{0}) parameter(0)
  %i = u32[] get-tuple-element(%state), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  %x.1 = f32[64]{0} get-tuple-element(%state), index=1
  %hop = (f32[64]{0}, f32[64]{0}) collective-permute-start(%x.1), source_target_pairs={{0,1},{1,0}}
  %more = f32[64]{0} fusion(%x.1), kind=kLoop, calls=%doubled
  %there = f32[64]{0} collective-permute-done(%hop)
  ROOT %state.1 = (u32[], f32[64]{0}) tuple(%next, %there)
}

%doubled (p.5: f32[64]) -> f32[64] {
  %p.5 = f32[64]{0} parameter(0)
  ROOT %sum.1 = f32[64]{0} add(%p.5, %p.5)
}

%goes_on (state.2: (u32[], f32[64])) -> pred[] {
  %state.2 = (u32[], f32[64]{0}) parameter(0)
  %at = u32[] get-tuple-element(%state.2), index=0
  %end = u32[] constant(7)
  ROOT %less = pred[] compare(%at, %end), direction=LT
}

ENTRY %main (w: bf16[64], x: f32[64], i.1: s32[]) -> f32[64] {
  %w = bf16[64]{0} parameter(0)
  %x = f32[64]{0} parameter(1)
  %i.1 = s32[] parameter(2)
  %chain.0 = (bf16[64]{0}, bf16[1024]{0}) fusion(%w), kind=kCustom, calls=%begun
  %chain.1 = (f32[64]{0}, bf16[1024]{0}) fusion(%w, %x), kind=kCustom, calls=%beside, metadata={op_name="jit(step)/jvp(M)/fc1/add"}
  %chain.2 = (bf16[64]{0}, bf16[1024]{0}) fusion(%w), kind=kCustom, calls=%begun
  %mean = f32[64]{0} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, to_apply=%sum
  %narrow = bf16[64]{0} all-reduce(%mean), replica_groups={}, to_apply=%sum
  %part = f32[16]{0} fusion(%x, %i.1), kind=kCustom, calls=%scattered
  %zero = u32[] constant(1)
  %begin = u32[] copy(%zero)
  %all = (u32[], f32[64]{0}) tuple(%begin, %mean)
  %loop = (u32[], f32[64]{0}) while(%all), condition=%goes_on, body=%trip
  ROOT %out = f32[64]{0} get-tuple-element(%loop), index=1
}
"""


def test_collectives_of_a_schedule_are_counted_once_with_what_a_chip_sends_and_what_runs_beside_them():
    """A chain of fusions is one; a sum that a fusion takes its piece of is scattered; a loop's counter says its trips: 1, 3, 5."""
    module = with_trips(parse(ON_CHIPS))
    assert (module.devices, module.uncounted) == (16, 0)
    sent = {one.what: one for one in vendor_collectives(module)}
    assert {name: (one.kind, one.count, one.sent_bytes) for name, one in sent.items()} == {
        "chain.0": ("all_gather", 1, 15 * 128),
        "mean": ("all_reduce", 1, 2 * 7 * 256 // 8),
        "narrow": ("all_reduce", 1, 2 * 15 * 128 // 16),
        "part": ("reduce_scatter", 1, 3 * 256 // 4),
        "hop": ("permute", 3, 3 * 256),
    }
    assert {name for name, one in sent.items() if one.beside_bytes == one.sent_bytes} == {"chain.0", "hop"}
    assert all(not one.beside_bytes for name, one in sent.items() if name not in ("chain.0", "hop"))


@pytest.mark.parametrize(
    ("old", "new"),
    [("direction=LT", "direction=NE"), ("%next = u32[] add(%i, %two)", "%next = u32[] multiply(%i, %two)"), ("constant(7)", "iota()")],
)
def test_a_loop_that_counts_in_another_way_stays_uncounted(old: str, new: str):
    assert old in ON_CHIPS
    assert with_trips(parse(ON_CHIPS.replace(old, new))).uncounted == 1


def test_a_training_on_a_mesh_is_compiled_by_both_for_the_same_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys):
    """The vendor's compile is given our Program's cuts; the text and the JSON have what each chip sends."""
    asked = []

    def compiled(fun, arguments, chip, placed, donate_argnums=()):
        jax.eval_shape(fun, *arguments)
        asked.append((placed, len(jax.tree.leaves(arguments)), donate_argnums))
        return vendor.Compiled(with_trips(parse(ON_CHIPS)), argument_bytes=0, temp_bytes=0, topology=vendor.Topology("v5e:4x4"))

    monkeypatch.setattr(vendor, "compile_ahead", compiled)
    monkeypatch.setattr(vendor, "topology_of", lambda chip, devices=1: vendor.Topology("v5e:4x4"))
    target = ["compare", "tests.test_estimating:mlp_step", "--batch", "32", "--mesh", "data=16", "--sharding", "zero3"]
    page = tmp_path / "found.html"
    assert cli.main([*target, "--json", str(tmp_path / "found.json"), "--html", str(page)]) == 0
    assert all(text in page.read_text() for text in ("on tpu-v5e x 16 (data 16)", "Between chips", "reduce_scatter", "largest differences"))
    found, ((placed, leaves, donated),) = json.loads((tmp_path / "found.json").read_text()), asked
    assert (placed.mesh, leaves, donated) == ({"data": 16}, len(placed.arguments), (0,))
    assert {(("data",),), ()} == {cut[:1] for cut in placed.arguments}, "shares of the state and pieces of the batch, and counts"
    assert found["mesh"] == {"data": 16}
    assert found["ours"]["sent_bytes"] == sum(one["sent_bytes"] for one in found["ours"]["collectives"]) > 0
    assert found["theirs"]["beside_bytes"] == 15 * 128 + 3 * 256
    assert cli.main(target) == 0
    text = capsys.readouterr().out
    assert "on tpu-v5e x 16 (data 16)" in text
    assert "sent by a chip" in text
    assert "reduce_scatter" in text


@pytest.mark.parametrize(("axis", "match"), [("data", "expected an axis and how many"), ("data=0", "expected an axis and how many")])
def test_what_is_no_axis_is_refused(axis: str, match: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(["compare", "tests.test_estimating:mlp_step", "--mesh", axis])
    assert match in capsys.readouterr().err


def test_a_function_lies_as_it_says_itself_and_slices_have_the_vendors_sizes(capsys, monkeypatch: pytest.MonkeyPatch):
    assert cli.main(["estimate", "tests.test_estimating:matmul_step", "--mesh", "data=2"]) == 2
    assert "gives a function, which says by itself how its arrays lie" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"slices of 4, 8, 16, .* and a mesh of 3\."):
        vendor.topology_of(tpuflow.get_chip("tpu-v5e"), 3)
    monkeypatch.setattr(vendor, "PACKAGE", "json")
    assert vendor.topology_of(tpuflow.get_chip("tpu-v3"), 16) == vendor.Topology("v3:2x4", 2)


def test_a_chip_that_the_vendor_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"chip 'bm1690': XLA:TPU compiles for tpu-v2, .*tpu-v7x\. Name one of them\."):
        tpuflow.compare(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32), chip="bm1690")


def test_without_the_vendors_compiler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vendor, "PACKAGE", "libtpu_that_is_not_there")
    with pytest.raises(ConfigError, match=r"needs XLA:TPU's compiler, which is in the package .*: pip install"):
        tpuflow.compare(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32), chip="tpu-v5e")
