"""`tpuflow.jit`, `tpuflow.sink`, estimates, checks of numerics."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random

import tpuflow
from tests.mistakes.setting import Net, inputs, labels
from tests.mistakes.table import mistake
from tpuflow.errors import (
    ConfigError,
    DataError,
    LaunchError,
    OutOfMemoryError,
    UnsupportedDtypeError,
    UnsupportedPrimitiveError,
)


@mistake(ConfigError, "tpuflow.jit", "float32[40, 7]", "give the function itself")
def jit_of_a_result():
    tpuflow.jit(jnp.sin(inputs))


@mistake(ConfigError, "backend", "'tpu'", "'tpusim'")
def a_backend_of_jax():
    tpuflow.jit(jnp.sin, backend="tpu")


@mistake(ConfigError, "engine", "'gpu'", "fast")
def an_engine_of_jit_that_does_not_exist():
    tpuflow.jit(jnp.sin, engine="gpu")


@mistake(ConfigError, "static_argnums", "has 3", "Count them from 0")
def a_static_argument_that_does_not_exist():
    tpuflow.jit(lambda x, n: x * n, static_argnums=3)


@mistake(ConfigError, "static_argnames", "'m'", "Name arguments of the function")
def a_static_argument_by_a_name_that_does_not_exist():
    tpuflow.jit(lambda x, n: x * n, static_argnames="m")


@mistake(ValueError, "static argument 1", "list", "hashable")
def a_list_as_static_argument():
    scaled = tpuflow.jit(lambda x, n: x * n[0], static_argnums=1)
    scaled(inputs, [2])


@mistake(TypeError, "tpuflow.jit", "'mean'", "static_argnums")
def a_word_as_argument():
    reduced = tpuflow.jit(lambda x, how: getattr(jnp, how)(x))
    reduced(inputs, "mean")


@mistake(ConfigError, "in_shardings: x float32[40, 7]", "axis 1 of 7 elements is cut over 4 chips (model)", "Cut another axis")
def seven_columns_over_four_chips():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    tpuflow.jit(lambda x: x * 2, in_shardings=columns)(inputs)


@mistake(ConfigError, "out_shardings", "P('data',)", "jax.set_mesh(mesh)")
def axes_of_no_mesh():
    tpuflow.jit(lambda x: x * 2, out_shardings=jax.sharding.PartitionSpec("data"))(inputs)


@mistake(jax.errors.TracerBoolConversionError, "train.py:2", "bool[]", "jax.lax.cond")
def an_if_inside_of_jit():
    def clipped(x):
        if x.sum() > 0:
            return x
        return -x

    tpuflow.jit(clipped)(inputs)


@mistake(jax.errors.ConcretizationTypeError, "train.py:2", "int32[]", "size=")
def the_places_that_are_not_zero():
    def places(x):
        return jnp.nonzero(x)[0]

    tpuflow.jit(places)(inputs)


@mistake(UnsupportedPrimitiveError, "train.py:2", "'schur' on (float32[40,40])", "Instead")
def a_factorisation_that_no_tpu_has():
    def triangular(x):
        return jax.lax.linalg.schur(x @ x.T)[0]

    tpuflow.jit(triangular)(inputs)


@mistake(UnsupportedPrimitiveError, "train.py:2", "'geqp3' on (float32[40,7], int32[7])", "Instead")
def a_factorisation_with_pivots():
    def orthogonal(x):
        return jax.lax.linalg.qr(x, pivoting=True)[0]

    tpuflow.jit(orthogonal)(inputs)


@mistake(UnsupportedDtypeError, "x:", "float64", "x.astype('float32')")
def numbers_of_64_bits():
    with jax.enable_x64(True):
        tpuflow.jit(jnp.sin)(np.ones(3))


@mistake(UnsupportedPrimitiveError, "train.py:2", "'ffi_call'", "jax.pure_callback")
def a_call_of_compiled_code_of_the_host():
    def called(x):
        return jax.ffi.ffi_call("rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    tpuflow.jit(called)(inputs)


@mistake(UnsupportedDtypeError, "key", "'zeros'", "use one of threefry2x32, rbg")
def random_keys_of_a_generator_of_ones_own():
    def no_bits(key, width, shape):
        return jnp.zeros(shape, f"uint{width}")

    zeros = random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: seed[None].astype("uint32"),
        split=lambda key, shape: jnp.zeros((*shape, 1), "uint32"),
        random_bits=no_bits,
        fold_in=lambda key, data: key,
        name="zeros",
        tag="zero",
    )
    tpuflow.jit(lambda key: jax.random.normal(key, (3,)))(jax.random.key(0, impl=zeros))


@mistake(TypeError, "compiled for arguments", "((*, *), {})", "lower it anew")
def a_compiled_function_with_another_number_of_arguments():
    compiled = tpuflow.jit(jnp.add).lower(inputs, inputs).compile()
    compiled(inputs)


@mistake(LaunchError, "input 'x'", "expected f32[40, 7], got float32[5, 7]", "compile another Program")
def a_compiled_function_with_another_shape():
    compiled = tpuflow.jit(jnp.sin).lower(inputs).compile()
    compiled(inputs[:5])


@mistake(OutOfMemoryError, "'sin'", "800,000,000,000 bytes", "What would help")
def more_than_the_chip_holds():
    large = jax.ShapeDtypeStruct((100_000, 1_000_000), jnp.float32)
    tpuflow.estimate(jnp.sin, large, chip="tpu-v4")


@mistake(ConfigError, "argument 0", "(128, 128)", "jax.ShapeDtypeStruct(shape, dtype)")
def shapes_that_are_only_numbers():
    tpuflow.estimate(jnp.dot, (128, 128), (128, 128))


@mistake(ConfigError, "chip", "'tpu-v9'", "Choose one of")
def an_estimate_for_an_unknown_chip():
    tpuflow.estimate(jnp.sin, inputs, chip="tpu-v9")


@mistake(ConfigError, "loss", "the data have none", "data=(inputs, labels)")
def an_estimate_of_a_training_from_numbers():
    tpuflow.estimate_training(Net(), ((32, 7), (32,)))


@mistake(ConfigError, "sink_size", "-1", "at least 0")
def an_estimate_of_a_sink_of_unknown_length():
    tpuflow.estimate_training(Net(), (inputs, labels), sink_size=-1)


@mistake(ConfigError, "calibration", "missing.toml", "Give a readable TOML file")
def constants_that_are_not_there():
    tpuflow.estimate(jnp.sin, inputs, calibration="missing.toml")


@mistake(ConfigError, "loss", "the data have none", "data=(inputs, labels)")
def a_check_of_numerics_without_labels():
    tpuflow.check_numerics(Net(), inputs)


@mistake(ConfigError, "check_numerics", "no policy given", "give one or more of")
def a_check_of_numerics_in_no_policy():
    tpuflow.check_numerics(Net(), (inputs, labels), policy=[])


@mistake(ConfigError, "data", "without batch_size", "give batch_size")
def a_loop_over_arrays_without_a_batch_size():
    tpuflow.sink(lambda state, batch: (state, ()), (inputs, labels), state=jnp.zeros(()))


@mistake(ConfigError, "step:", "got float32[]", "return a pair")
def a_step_that_returns_its_state_only():
    def step(state, batch):
        return state + 1

    tpuflow.sink(step, [inputs], state=jnp.zeros(()))


@mistake(ConfigError, "step:", "was float32[] and is float16[]", "x.astype(...)")
def a_step_that_changes_the_type_of_its_state():
    def step(state, batch):
        return state.astype(jnp.float16), ()

    tpuflow.sink(step, [inputs], state=jnp.zeros(()))


@mistake(ConfigError, "step:", "lost is steps", "Return every part of it")
def a_step_that_drops_a_part_of_its_state():
    def step(state, batch):
        return {"w": state["w"]}, ()

    tpuflow.sink(step, [inputs], state={"w": jnp.zeros(3), "steps": 0})


@mistake(ConfigError, "state: ['name']", "'adam'", "Leave it out of the state")
def a_state_that_holds_a_word():
    tpuflow.sink(lambda state, batch: (state, ()), [inputs], state={"name": "adam"})


@mistake(ConfigError, "step_fn", "a Net", "tpuflow.train")
def a_model_instead_of_a_step():
    tpuflow.sink(Net(), [inputs], state=jnp.zeros(()))


@mistake(ConfigError, "size", "-2", "at least -1")
def a_loop_of_minus_two_steps():
    tpuflow.sink(lambda state, batch: (state, ()), [inputs], -2, state=jnp.zeros(()))


@mistake(ConfigError, "drop_remainder", "a list of 1", "make them as you want them")
def leaving_out_the_rest_of_a_stream():
    tpuflow.sink(lambda state, batch: (state, ()), [inputs], state=jnp.zeros(()), drop_remainder=True)


@mistake(DataError, "data", "PyTreeDef([*])", "Make all batches alike")
def batches_of_two_structures():
    loop = tpuflow.sink(lambda state, batch: (state, ()), [{"x": inputs}, [inputs]], 0, state=jnp.zeros(()))
    for _ in loop:
        pass


@mistake(ConfigError, "TPUFLOW_CACHE_BYTES", "'4 GB'", "how many bytes")
def a_compilation_cache_of_no_number_of_bytes():
    os.environ.update(TPUFLOW_CACHE="cache", TPUFLOW_CACHE_BYTES="4 GB")
    tpuflow.jit(jnp.sin)(inputs)


@mistake(ConfigError, "/cache", "can be written by others (mode 777)", "chmod 700")
def a_compilation_cache_that_everybody_can_write_to():
    os.mkdir("cache")
    os.chmod("cache", 0o777)
    os.environ["TPUFLOW_CACHE"] = "cache"
    tpuflow.jit(jnp.sin)(inputs)


@mistake(ConfigError, "the compilation cache", "is no folder of its own", "name one")
def a_compilation_cache_that_is_a_link():
    os.symlink(".", "cache")
    os.environ["TPUFLOW_CACHE"] = "cache"
    tpuflow.jit(jnp.sin)(inputs)
