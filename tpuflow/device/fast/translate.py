"""A stage of a Program (`cuts`) as one traceable JAX function: buffers are arrays, blocks are XLA control flow, kernels are lifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast import liveness
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.cuts import Key, Stage
from tpuflow.device.fast.kernel import translate_kernel
from tpuflow.device.verify.footprint import cover, section_trips, store_box
from tpuflow.isa.dma import Store
from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Block, Infeed, Kernel, Loop, Outfeed, Program, Switch, While, walk


@dataclass
class Translation:
    """A Program made ready for tracing; `tiers` fills with the tier of every kernel, by place, while it is traced."""

    program: Program
    bitexact: bool
    tiers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {id(b): place for place, b in walk(self.program.code)}
        self.whole = frozenset((id(k), b) for k in self.program.kernels() for b in _overwritten(k, self.program))

    def __call__(
        self, stage: Stage, zero: Any, trips: Any, arrays: Mapping[Key, Any], infeeds: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a stage: zero is a run-time s32 0, trips how many of its loop's trips to run, arrays what the stage takes, in the types of
        their buffers; infeeds are stacked items.

        Returns (the Program's outputs if it is the final stage, what the stage gives, likewise).
        """
        program = self.program
        ar = LaxArithmetic(self.bitexact, zero)
        env: dict[Any, Any] = {
            c.buffer: ar.hold(_constant(program, c.buffer, c.data), program.buffers[c.buffer].dtype) for c in program.constants
        }
        env.update({k: ar.hold(x, program.buffers[k].dtype) if isinstance(k, int) else x for k, x in arrays.items()})
        run = _Run(self, ar, list(infeeds))
        if stage.loop is not None:
            run.slice(stage.loop, env, stage.after, trips)
        else:
            run.blocks(stage.blocks, env, stage.after)

        def stored(key: Key) -> Any:
            return ar.store(run.buffer(env, key), program.buffers[key].dtype) if isinstance(key, int) else env[key]

        return [stored(p.buffer) for p in program.outputs] if stage.final else [], [stored(k) for k in stage.gives]


def _overwritten(kernel: Kernel, program: Program) -> list[int]:
    """The buffers that a kernel's stores overwrite completely."""
    stores: dict[int, list[tuple[str, Window]]] = {}
    for section in ("prologue", "body", "epilogue"):
        for i in getattr(kernel, section):
            if isinstance(i, Store):
                stores.setdefault(i.window.buffer, []).append((section, i.window))
    return [b for b, found in stores.items() if any(_covers(kernel, w) for _, w in found) or _cover_together(kernel, found, program, b)]


def _cover_together(kernel: Kernel, stores: list[tuple[str, Window]], program: Program, buffer: int) -> bool:
    boxes = [store_box(window, section_trips(kernel, section)) for section, window in stores] if len(stores) > 1 else []
    return bool(boxes) and cover([box for box in boxes if box is not None], program.buffers[buffer].elems)


def _covers(kernel: Kernel, window: Any) -> bool:
    """A plain store whose windows make up the whole buffer (every axis walked from 0 to its extent in tile steps)."""
    for axis, tile in zip(window.axes, window.tile.axes, strict=True):
        grid = ((tile.grid, tile.size),) if tile.grid >= 0 and kernel.grid[tile.grid].size > 1 else ()
        moves = tuple((g, e) for g, e in axis.grid if kernel.grid[g].size > 1)
        plain = axis.origin == 0 and axis.step == 1 and axis.dilation == 1 and axis.register is None
        if not plain or moves != grid or tile.whole != axis.extent:
            return False
    return True


def _constant(program: Program, buffer: int, data: bytes) -> Any:
    b = program.buffers[buffer]
    return jnp.asarray(np.frombuffer(data, b.dtype.numpy).reshape(b.shape))


class _Run:
    """One pass over the blocks. `env` maps buffer index to array; ("taken", p), ("sent", p), ("outfeed", p) are the ports' state."""

    def __init__(self, translation: Translation, ar: LaxArithmetic, infeeds: list[Any]):
        self.t, self.ar, self.infeeds = translation, ar, infeeds
        self.program = translation.program

    def buffer(self, env: dict[Any, Any], index: int) -> Any:
        """Content of a buffer; one that nothing wrote (zero elements, or partly stored so far) reads as zeros."""
        b = self.program.buffers[index]
        return env[index] if index in env else jnp.zeros(b.shape, self.ar.held_type(b.dtype))

    def blocks(self, code: tuple[Block, ...], env: dict[Any, Any], after: frozenset[int]) -> None:
        """Run blocks in order; buffers that are not needed any more leave `env`."""
        need = liveness.needed_before(code, after, self.t.whole)
        for block, later in zip(code, need[1:], strict=True):
            self._block(block, env, later)
            for key in [k for k in env if isinstance(k, int) and k not in later]:
                del env[key]

    def _block(self, block: Block, env: dict[Any, Any], after: frozenset[int]) -> None:
        match block:
            case Kernel():
                self._kernel(block, env)
            case Infeed():
                item = env["taken", block.port]
                value = lax.dynamic_index_in_dim(self.infeeds[block.port], item, 0, keepdims=False)
                env[block.buffer] = self.ar.hold(value, self.program.buffers[block.buffer].dtype)
                env["taken", block.port] = item + 1
            case Outfeed():
                item = env["sent", block.port]
                value = self.ar.store(self.buffer(env, block.buffer), self.program.buffers[block.buffer].dtype)
                env["outfeed", block.port] = lax.dynamic_update_index_in_dim(env["outfeed", block.port], value, item, 0)
                env["sent", block.port] = item + 1
            case Loop():
                self._loop(block, env, after)
            case While():
                self._while(block, env, after)
            case Switch():
                self._switch(block, env, after)

    def _kernel(self, kernel: Kernel, env: dict[Any, Any]) -> None:
        used = {w.buffer for i in kernel.instructions for _, w in i.windows()}
        hbm = {b: self.buffer(env, b) for b in used if b in env or b in liveness.reads(kernel)}
        written, tier = translate_kernel(kernel, self.program.buffers, hbm, self.ar)
        env.update(written)
        self.t.tiers[self.t.places[id(kernel)]] = tier

    def _carry(self, body: tuple[Block, ...], env: dict[Any, Any], need: frozenset[int]) -> list[Any]:
        """What a loop carries: buffers it writes that matter at its head, and the state of its ports."""
        buffers = sorted(liveness.all_writes(body) & need)
        ports = [k for k in env if not isinstance(k, int) and k[1] in _ports(body, k[0])]
        return [*buffers, *ports]

    def _values(self, keys: list[Any], env: dict[Any, Any]) -> list[Any]:
        return [self.buffer(env, k) if isinstance(k, int) else env[k] for k in keys]

    def slice(self, block: Loop | While, env: dict[Any, Any], after: frozenset[int], trips: Any) -> None:
        """So many more trips of a loop; of a while at most so many, its condition computed already."""
        if isinstance(block, Loop):
            self._loop(block, env, after, trips)
        else:
            self._while(block, env, after, trips)

    def _loop(self, block: Loop, env: dict[Any, Any], after: frozenset[int], trips: Any = None) -> None:
        need = liveness.loop_need(block.body, after, self.t.whole)
        keys = self._carry(block.body, env, need)

        def trip(_: Any, carry: list[Any]) -> list[Any]:
            inner = {**env, **dict(zip(keys, carry, strict=True))}
            self.blocks(block.body, inner, need)
            return self._values(keys, inner)

        env.update(zip(keys, lax.fori_loop(0, env[block.trips] if trips is None else trips, trip, self._values(keys, env)), strict=True))

    def _while(self, block: While, env: dict[Any, Any], after: frozenset[int], most: Any = None) -> None:
        need = liveness.while_need(block, after, self.t.whole)
        at_body = liveness.needed_before(block.body, need, self.t.whole)[0] | after | {block.predicate}
        if most is None:
            self.blocks(block.condition, env, at_body | need)
        keys = self._carry(block.condition + block.body, env, at_body | need)

        def trip(carry: list[Any]) -> list[Any]:
            inner = {**env, **dict(zip(keys, carry, strict=True))}
            self.blocks(block.body, inner, need)
            self.blocks(block.condition, inner, at_body | need)
            return self._values(keys, inner)

        def more(carry: list[Any]) -> Any:
            return carry[keys.index(block.predicate)]

        if block.predicate not in keys:
            keys = [block.predicate, *keys]
        if most is None:
            env.update(zip(keys, lax.while_loop(more, trip, self._values(keys, env)), strict=True))
            return
        first = jnp.int32(0), self._values(keys, env)
        _, carried = lax.while_loop(lambda c: (c[0] < most) & more(c[1]), lambda c: (c[0] + 1, trip(c[1])), first)
        env.update(zip(keys, carried, strict=True))

    def _switch(self, block: Switch, env: dict[Any, Any], after: frozenset[int]) -> None:
        everything = tuple(b for branch in block.branches for b in branch)
        keys = self._carry(everything, env, after)

        def branch(code: tuple[Block, ...]) -> Any:
            def run(_: None) -> list[Any]:
                inner = dict(env)
                self.blocks(code, inner, after)
                return self._values(keys, inner)

            return run

        index = jnp.clip(env[block.index], 0, len(block.branches) - 1)
        env.update(zip(keys, lax.switch(index, [branch(b) for b in block.branches], None), strict=True))


def _ports(code: tuple[Block, ...], key: str) -> frozenset[int]:
    kind = Infeed if key == "taken" else Outfeed
    return frozenset(b.port for _, b in walk(code) if isinstance(b, kind))
