"""docs/walk.md, one convolution from Flax to bytes, and the README's lines of graph and assembly: `python -m bench.walk`."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax import numpy as jnp

from tpuflow.compiler import compile_jaxpr
from tpuflow.device.runtime import Executable
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import code_hash, to_bytes
from tpuflow.isa.program import Program

ROOT = Path(__file__).parents[1]
PATH, README = ROOT / "docs" / "walk.md", ROOT / "README.md"
SECTION, AFTER = "## Compile a function, look at it, save it", "## Reading on"
"""The README's section whose example is compiled, and the next."""
CHIP = "tpu-v4"
SHOWN_BYTES, BYTES_A_LINE = 96, 16


class Layer(nn.Module):
    """Images [1, 8, 8, 3] -> [1, 4, 4, 16]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """A strided convolution with a bias, rectified."""
        return nn.relu(nn.Conv(16, (3, 3), strides=2, name="conv")(x))


def _block(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _dump(data: bytes) -> str:
    """Bytes in hexadecimal, and as text where they are any."""
    lines = []
    for at in range(0, min(len(data), SHOWN_BYTES), BYTES_A_LINE):
        row = data[at : at + BYTES_A_LINE]
        words = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:04x}  {row.hex(' '):<{3 * BYTES_A_LINE}} {words}")
    return "\n".join(lines)


def stages(closed: Any) -> tuple[list[tuple[str, str]], Program]:
    """(name and text of the graph wherever a stage has changed it, the Program) of a jaxpr."""
    found: list[tuple[str, str]] = []

    def watch(stage: str, graph: Any) -> None:
        if not found or found[-1][1] != str(graph):
            found.append((stage, str(graph)))

    return found, compile_jaxpr(closed, name="layer", chip=CHIP, input_names=("bias", "kernel", "x"), watch=watch)


def largest_difference(program: Program, variables: Any, x: jax.Array) -> tuple[bool, float]:
    """(whether the engines give equal bits, the largest difference from the layer in float64 relative to its largest element)."""
    inputs = [np.asarray(array) for array in (*jax.tree.leaves(variables), x)]
    (one,), (other,) = (Executable(program, engine, "bitexact").launch(inputs)[0] for engine in ("reference", "fast"))
    with jax.enable_x64(True):
        wide = [jax.tree.map(lambda a: np.asarray(a, np.float64), tree) for tree in (variables, x)]
        exact = np.asarray(jax.jit(Layer().apply)(*wide))
    return bool((np.asarray(one) == np.asarray(other)).all()), float(np.abs(np.asarray(one) - exact).max() / np.abs(exact).max())


def document() -> str:
    """The page."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 8, 3)), jnp.float32)
    variables = Layer().init(jax.random.key(0), x)
    closed = jax.make_jaxpr(Layer().apply)(variables, x)
    graphs, program = stages(closed)
    (imported, first), *later = graphs
    text = disassemble(program)
    data = to_bytes(program)
    equal, apart = largest_difference(program, variables, x)
    parts = [
        "# One convolution from Flax to bytes",
        "Made by `python -m bench.walk`; do not edit. The stages are those of [architecture.md](architecture.md).",
        "## What the user writes",
        _block(inspect.getsource(Layer), "python"),
        "## The jaxpr that JAX traces it to",
        _block(str(closed)),
        f"## The graph that the importer makes of it (`{imported}`)",
        "Whole tensors; every primitive is one or several of our own operations. Axes of the product are labelled as in einsum; an axis\n"
        "of the images that an output position and a kernel position address together has both labels. At the right: the user's line\n"
        "and module.",
        _block(first),
        *(part for stage, graph in later for part in (f"## After `{stage}`", _block(graph))),
        "From here on a node is a kernel: what stands in a region runs together, and only its operands and results are in HBM.",
        f"## The Program for {CHIP}",
        "Buffers at their addresses in HBM, tiles at theirs on the chip, windows between the two, and instructions of six queues that\n"
        "meet at semaphores. This layer fits the chip's memory whole, so its kernel has no grid: one trip.",
        _block(text[text.index("buffers\n") :]),
        "## The bytes",
        f"The file has {len(data)} bytes, names and source lines included; the code's hash is `{code_hash(program)}`. It begins:",
        _block(_dump(data)),
        "## The values",
        f"The reference engine, tile by tile, and the fast engine, one XLA:CPU executable, give {'equal' if equal else 'DIFFERENT'} bits: "
        f"{apart:.1e} of\nthe largest element from float64, since this chip multiplies f32 in one pass of bf16.",
        "## The time",
        _block(Executable(program).time().table()),
    ]
    return "\n\n".join(parts) + "\n"


LINES = 12


def readme(text: str) -> str:
    """The README with what its example compiles to: the first lines of the graph, and of the instructions."""
    before, section = text.split(SECTION)
    section, after = section.split(AFTER)
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code.split("compiled =")[0], "step.py", "exec"), names)
    closed = names["step"].lower(names["w"], names["x"]).jaxpr
    graphs: list[str] = []
    program = compile_jaxpr(closed, name="step", input_names=("w", "x"), watch=lambda stage, graph: graphs.append(str(graph)))
    assembly = disassemble(program).partition("    body\n")[2]
    graph = re.sub(r" +(# .*?)(  \[.*\])?$", r"  \1", graphs[0], flags=re.MULTILINE)  # the scope is in JAX's words, which change
    shown = ("\n".join(text.splitlines()[:LINES]) for text in (graph, assembly))
    parts = [
        section[: section.index("```", section.index("```python") + 3) + 3],
        "It begins as this graph, and ends as such instructions, one of six queues each, that meet at semaphores "
        "(with that code in step.py,\n`TPUFLOW_DUMP=folder python step.py` writes both, and the graph after every pass):",
        *(_block(f"{textwrap.dedent(text)}\n...") for text in shown),
    ]
    return before + SECTION + "\n\n".join(parts) + "\n\n" + AFTER + after


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
