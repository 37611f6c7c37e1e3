"""The command line."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import tpuflow
from tests.mistakes.setting import inputs
from tests.mistakes.table import CommandFailed, command, mistake


@mistake(CommandFailed, "command", "'rnu'", "run")
def a_misspelt_command():
    command("rnu step.tpx")


@mistake(CommandFailed, "step.tpx", "no such file or folder", "give another path")
def a_program_that_is_not_there():
    command("run step.tpx")


@mistake(CommandFailed, "step.tpx", "it starts with b'def trai'", "give a .tpx file")
def a_file_that_is_no_program():
    open("step.tpx", "w").write("def train(): ...")
    command("run step.tpx")


@mistake(CommandFailed, "inputs", "missing ['x']", "Give every input by its name")
def a_program_without_its_inputs():
    tpuflow.jit(jnp.sin).lower(inputs).compile().save("step.tpx")
    command("run step.tpx")


@mistake(CommandFailed, "x.npz", "float32[5, 7]", "f32[40, 7]")
def inputs_of_another_shape():
    tpuflow.jit(jnp.sin).lower(inputs).compile().save("step.tpx")
    np.savez("x.npz", x=inputs[:5])
    command("run step.tpx --inputs x.npz")


@mistake(CommandFailed, "--outputs: results/y.npz", "no such file or folder", "Make it")
def outputs_in_a_folder_that_is_not_there():
    tpuflow.jit(jnp.sin).lower(inputs).compile().save("step.tpx")
    np.savez("x.npz", x=inputs)
    command("run step.tpx --inputs x.npz --outputs results/y.npz")


@mistake(CommandFailed, "inputs", "unknown ['a']", "it takes ['x']")
def inputs_of_another_name():
    tpuflow.jit(jnp.sin).lower(inputs).compile().save("step.tpx")
    np.savez("x.npz", a=inputs)
    command("run step.tpx --inputs x.npz")


@mistake(CommandFailed, "--engine", "'gpu'", "fast")
def an_unknown_engine_of_the_command_line():
    command("run step.tpx --engine gpu")


@mistake(CommandFailed, "'models.resnet'", "expected module:function", "for example tpuflow.examples.models.resnet:resnet50_step")
def a_target_that_names_no_function():
    command("estimate models.resnet")


@mistake(CommandFailed, "'models.resnte:step'", "No module named 'models.resnte'", "Run the command in the folder")
def a_target_in_an_unknown_module():
    command("estimate models.resnte:step")


@mistake(CommandFailed, "models.resnet", "'resnet50_stpe'", "Did you mean 'resnet50_step'?")
def a_target_that_is_no_function():
    command("estimate models.resnet:resnet50_stpe")


@mistake(CommandFailed, "chip", "'tpu-v9'", "Choose one of")
def an_unknown_chip_of_the_command_line():
    command("estimate models.resnet:resnet50_step --chip tpu-v9")


@mistake(CommandFailed, "--batch", "0", "at least 1")
def an_estimate_of_no_samples():
    command("estimate models.resnet:resnet50_step --batch 0")


@mistake(CommandFailed, "before.json", "a list, as of a sweep", "of one step")
def differences_from_a_sweep():
    open("before.json", "w").write("[]")
    command("diff before.json before.json")


@mistake(CommandFailed, "before.json", "no profile of this version", "`tpuflow estimate ... --json FILE`")
def differences_from_another_file():
    open("before.json", "w").write('{"losses": [2.3, 1.9]}')
    command("diff before.json before.json")


@mistake(CommandFailed, "step.txt:1:1", "found 'def'", "expected 'tpx")
def a_text_that_is_no_program():
    open("step.txt", "w").write("def train(): ...\n")
    command("assemble step.txt -o step.tpx")
