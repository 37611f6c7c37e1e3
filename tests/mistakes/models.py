"""Models that are none, cannot be trained, or do not take what they are given."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import tpuflow
from tests.mistakes.setting import Net, inputs, labels
from tests.mistakes.table import mistake
from tpuflow.errors import ConfigError, DataError, UnsupportedDtypeError, UnsupportedPrimitiveError


@mistake(ConfigError, "model", "the class Net", "pass an instance, Net(...)")
def a_class_instead_of_a_model():
    tpuflow.train(Net, (inputs, labels))


@mistake(ConfigError, "model", "plain function", "params=")
def a_function_instead_of_a_model():
    tpuflow.train(lambda x: x @ np.ones((7, 3)), (inputs, labels))


@mistake(ConfigError, "model", "a dict", "params=")
def parameters_instead_of_a_model():
    variables = Net().init(jax.random.key(0), inputs)
    tpuflow.train(variables, (inputs, labels))


@mistake(ConfigError, "model", "PyTorch module Linear", "write it in Flax")
def a_model_of_pytorch():
    import torch

    tpuflow.train(torch.nn.Linear(7, 3), (inputs, labels))


@mistake(ConfigError, "Parameterless", "no parameters", "Give it layers")
def a_model_without_parameters():
    class Parameterless(nn.Module):
        def __call__(self, x):
            return x

    tpuflow.train(Parameterless(), (inputs, labels))


@mistake(ConfigError, "order is of int32", "no gradient", "frozen=['order']")
def a_parameter_that_has_no_gradient():
    class Ordered(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)[:, self.param("order", lambda key: jnp.arange(3))]

    tpuflow.train(Ordered(), (inputs, labels))


@mistake(DataError, "TwoOutputs", "got a tuple of 2", "Give a function loss(outputs, labels)")
def a_model_of_two_outputs_without_a_loss_for_them():
    class TwoOutputs(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x), x

    tpuflow.train(TwoOutputs(), (inputs, labels))


@mistake(DataError, "Masked", "missing 1 required positional argument: 'mask'", "Give")
def a_model_that_needs_another_argument():
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return nn.Dense(3)(x * mask)

    tpuflow.train(Masked(), (inputs, labels))


@mistake(jax.errors.TracerBoolConversionError, "train.py:5: `if x.sum() > 0:`", "bool[]", "jnp.where")
def an_if_on_what_the_data_say():
    class Branching(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            if x.sum() > 0:
                x = 2 * x
            return x

    tpuflow.train(Branching(), (inputs, labels))


@mistake(jax.errors.TracerBoolConversionError, "train.py:5: `while jnp.max(x) > 1:`", "bool[]", "jax.lax.while_loop")
def a_while_loop_on_what_the_data_say():
    class Looping(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            while jnp.max(x) > 1:
                x = x / 2
            return x

    tpuflow.train(Looping(), (inputs, labels))


@mistake(jax.errors.ConcretizationTypeError, "train.py:5: `return x / float(x.max())`", "float32[]", "Keep numbers arrays")
def a_number_taken_out_of_the_model():
    class Measuring(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            return x / float(x.max())

    tpuflow.train(Measuring(), (inputs, labels))


@mistake(jax.errors.TracerArrayConversionError, "train.py:5", "float32[32,3]", "jax.numpy")
def numpy_inside_of_a_model():
    class WithNumpy(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            return np.tanh(np.asarray(x))

    tpuflow.train(WithNumpy(), (inputs, labels))


@mistake(jax.errors.NonConcreteBooleanIndexError, "train.py:5", "bool[32]", "jnp.where(mask, x, 0)")
def a_shape_that_depends_on_the_data():
    class Picking(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            return x[x[:, 0] > 0]

    tpuflow.train(Picking(), (inputs, labels))


@mistake(jax.errors.TracerBoolConversionError, "train.py:2", "bool[]", "jnp.where")
def an_if_in_the_loss():
    def loss(outputs, labels):
        return outputs.mean() if outputs.sum() > 0 else -outputs.mean()

    tpuflow.train(Net(), (inputs, labels), loss=loss)


@mistake(jax.errors.TracerBoolConversionError, "train.py:9: `if x.sum() > 0:`", "bool[]", "jnp.where")
def a_model_of_nnx_with_an_if_on_the_data():
    from flax import nnx

    class Branching(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(7, 3, rngs=rngs)

        def __call__(self, x):
            x = self.dense(x)
            if x.sum() > 0:
                x = 2 * x
            return x

    tpuflow.train(Branching(nnx.Rngs(0)), (inputs, labels))


@mistake(KeyError, "train.py:4", "my own mistake", "while initialising model Broken")
def an_error_of_the_models_own():
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise KeyError("my own mistake")

    tpuflow.train(Broken(), (inputs, labels))


@mistake(DataError, "train.py:4", "float32[32, 7]", "Give inputs of a shape")
def a_model_for_one_number_of_features_only():
    class Fixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x.reshape(-1, 28 * 28))

    tpuflow.train(Fixed(), (inputs, labels))


@mistake(DataError, "chosen by the integer labels", "one output", "sigmoid_cross_entropy")
def one_output_for_two_classes():
    tpuflow.train(nn.Dense(1), (inputs, labels % 2))


@mistake(UnsupportedPrimitiveError, "train.py:5", "'geqp3' on (float32[7,7], int32[7])", "Instead, use jnp.linalg.svd")
def a_decomposition_inside_of_a_model():
    class Orthogonal(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (7, 7))
            return nn.Dense(3)(x @ jax.lax.linalg.qr(w, pivoting=True)[0])

    tpuflow.train(Orthogonal(), (inputs, labels))


@mistake(UnsupportedPrimitiveError, "train.py:5", "'geqp3' on (float32[7,7], int32[7])", "Instead, use jnp.linalg.svd")
def the_line_of_the_model_under_autocast():
    class Orthogonal(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (7, 7))
            return nn.Dense(3)(x @ jax.lax.linalg.qr(w, pivoting=True)[0])

    tpuflow.train(Orthogonal(), (inputs, labels), "mixed")


@mistake(UnsupportedDtypeError, "argument 0", "complex64", "two float32 arrays")
def complex_parameters_of_a_model():
    class Rotated(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (7, 3), jnp.complex64)
            return jnp.abs(x @ w)

    tpuflow.train(Rotated(), (inputs, labels))
