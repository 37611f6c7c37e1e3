"""Training steps over a mesh of chips: partitioned by shardings or by rules for parameters, and the values of one device."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding

import tpuflow
from tests.partitioning import CLOSE, RNG, P, cut, floats, kinds
from tpuflow.errors import ConfigError


def _parameters() -> dict[str, np.ndarray]:
    shapes = {"embed": (32, 16), "qkv": (16, 3, 4, 4), "out": (4, 4, 16), "up": (16, 64), "down": (64, 16), "scale": (16,)}
    return {name: floats(*shape) for name, shape in shapes.items()}


def _transformer_loss(p: Any, tokens: Any, lie: Callable[[Any], Any]) -> Any:
    def norm(x: Any) -> Any:
        return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * (1 + p["scale"])

    x = lie(jnp.take(p["embed"], tokens, axis=0))
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dkhc->btkhc", norm(x), p["qkv"]), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, k) / 2)
    x = lie(x + jnp.einsum("bhts,bshc,hcd->btd", weights, v, p["out"]))
    x = lie(x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"])
    logits = norm(x) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


_TENSOR_PARALLEL = {
    "embed": (), "qkv": (None, None, "model"), "out": ("model",), "up": (None, "model"), "down": ("model",), "scale": (),
}  # fmt: skip
_BOTH = ("data", "model")
STRATEGIES: dict[str, tuple[Callable[[str], NamedSharding], NamedSharding]] = {
    "data parallel": (lambda name: cut(), cut(_BOTH)),
    "fully sharded": (lambda name: cut(*((None, _BOTH) if name == "up" else (_BOTH,) if name in ("embed", "scale", "down") else ("model",)))
                      if name != "qkv" else cut(_BOTH), cut(_BOTH)),
    "tensor parallel": (lambda name: cut(*_TENSOR_PARALLEL[name]), cut("data")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-2, eps=1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_transformers_step_is_that_of_one_device(strategy: str, optimizer: optax.GradientTransformation) -> None:
    of, batch = STRATEGIES[strategy]
    parameters, tokens = _parameters(), RNG.integers(0, 32, (8, 6)).astype(np.int32)

    def step(parameters: Any, state: Any, tokens: Any, lie: Any = lambda x: x) -> Any:
        loss, gradients = jax.value_and_grad(_transformer_loss)(parameters, tokens, lie)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    state = optimizer.init(parameters)
    named = {name: of(name) for name in parameters}
    states = optax.tree_map_params(optimizer, lambda _, s: s, state, named, transform_non_params=lambda _: cut())
    partitioned = tpuflow.jit(
        lambda *args: step(*args, lie=lambda x: lax.with_sharding_constraint(x, batch)),
        in_shardings=(named, states, batch), out_shardings=(named, states, cut()), donate_argnums=(0, 1),
    )  # fmt: skip
    made = kinds(partitioned.lower(parameters, state, tokens).compile())
    expected = jax.jit(step)(parameters, state, tokens)
    found = partitioned(parameters, state, tokens)  # which takes the parameters and the state
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=3e-3)
    assert set(made) == {"all_reduce", "all_gather", "reduce_scatter"} if strategy == "fully sharded" else set(made) == {"all_reduce"}
    assert made["reduce_scatter"] >= len(parameters) if strategy == "fully sharded" else made["all_reduce"] >= len(parameters)


def _two_layers(state: Any, batch: Any) -> Any:
    """A step of Adam."""
    x, y = batch
    value, gradient = jax.value_and_grad(lambda p: jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - y) ** 2))(state[0])
    updates, adam = ADAM.update(gradient, state[1])
    return (optax.apply_updates(state[0], updates), adam), value


ADAM = optax.adam(1e-2, eps=1e-3)
_BATCHES = [(floats(8, 16), floats(8, 16)) for _ in range(4)]


def _sunk(step: Callable[..., Any], **options: Any) -> tuple[list[np.ndarray], tpuflow.Sink]:
    """The losses of two sinks of three steps and the last parameters; the loop."""
    params = {"up": np.ones((16, 32), np.float32) / 8, "down": np.ones((32, 16), np.float32) / 8}
    loop = tpuflow.sink(step, _BATCHES, 3, state=(params, ADAM.init(params)), epochs=2, **options)
    losses = [sunk.metrics for sunk in loop]
    return [*losses, *jax.tree.leaves(loop.state[0])], loop


@pytest.mark.slow
def test_steps_of_a_sink_are_partitioned_and_what_is_not_said_to_be_cut_stays_as_the_partitioner_has_it_after_a_step() -> None:
    lies = {"up": cut(None, "model"), "down": cut("model")}, None
    step = jax.jit(_two_layers, in_shardings=(lies, cut("data")), out_shardings=(lies, None))
    (wanted, _), (found, loop) = _sunk(_two_layers), _sunk(step)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)
    program = loop.executables[0].program
    cuts = {port.name: port.cut for port in program.inputs}
    columns, rows = ((), (1,)), ((1,), ())
    assert cuts == {
        "trips": (), "0/up": columns, "0/down": rows, "1/0/count": (), "1/0/mu/up": columns, "1/0/mu/down": rows, "1/0/nu/up": columns,
        "1/0/nu/down": rows,
    }  # fmt: skip
    assert [port.cut for port in program.outputs] == list(cuts.values())[1:]
    assert [port.cut for port in program.infeeds] == [((0,), ()), ((0,), ())]
    exact, reference = (_sunk(step, **options)[0] for options in ({"fidelity": "bitexact"}, {"engine": "reference"}))
    assert all(np.array_equal(one, other) for one, other in zip(exact, reference, strict=True))


class Layers(nn.Module):
    """Two layers with dropout between them."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dropout(0.2, deterministic=not train)(nn.gelu(nn.Dense(32, name="up")(x)))
        return nn.Dense(12, name="down")(x)


SAMPLES = floats(62, 16), RNG.integers(0, 12, 62).astype(np.int32)
BY_TENSOR = {"up/kernel": P(None, "model"), "up/bias": P("model"), "down/kernel": P("model")}


def _trained(samples: int = 62, epochs: int = 2, **options: Any) -> tpuflow.TrainResult:
    data = SAMPLES[0][:samples], SAMPLES[1][:samples]
    return tpuflow.train(
        Layers(),
        data,
        optimizer=ADAM,
        loss="softmax_cross_entropy",
        batch_size=16,
        epochs=epochs,
        eval_data=data,
        progress=False,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rules", [BY_TENSOR, {"*/kernel": P("data")}], ids=["tensor parallel", "fully sharded"])
def test_a_training_by_rules_is_that_of_one_chip_and_averages_and_moments_lie_as_their_parameters(rules: Any) -> None:
    one, several = _trained(ema=0.9), _trained(ema=0.9, mesh={"data": 4, "model": 2}, sharding=rules)
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-6)
    assert [epoch["accuracy"] for epoch in several.history] == [epoch["accuracy"] for epoch in one.history]
    cuts = {port.name: port.cut for port in several.executables[0].program.inputs}
    for pattern in rules:
        of_parameters = [name for name in cuts if name.startswith("params/") and fnmatchcase(name.removeprefix("params/"), pattern)]
        for name in of_parameters:
            assert cuts[name] and {cuts[n] for n in cuts if n.endswith(name.removeprefix("params/"))} == {cuts[name]}, name
    exact, reference = (
        _trained(22, 1, mesh={"data": 4, "model": 2}, sharding=rules, **options).losses  # a whole batch, and one of 6
        for options in ({"fidelity": "bitexact"}, {"engine": "reference"})
    )
    assert exact == reference


@pytest.mark.parametrize(("options", "text"), [
    ({"sharding": BY_TENSOR}, "give one, such as mesh={'data': 4}"),
    ({"mesh": {"data": 2}, "sharding": {"*/kernel": "data"}}, "expected patterns of parameter paths with jax.sharding.PartitionSpecs"),
    ({"mesh": {"data": 2}, "sharding": {"across/*": P("data")}}, r"'across/\*' matches no parameter; there are down/bias"),
    ({"mesh": {"data": 2}, "sharding": BY_TENSOR}, r"down/kernel float32\[32, 12\]: .* names the axis 'model', and the mesh has 'data'"),
    ({"mesh": {"data": 5}, "sharding": {"*/kernel": P("data")}}, "a batch of 16 samples does not divide over the 5 chips"),
    ({"mesh": {"data": 2, "model": 5}, "sharding": {"down/kernel": P(None, "model")}}, r"axis 1 of 12 .* over 5 chips \(model\)"),
    ({"mesh": {"data": 2}, "sharding": {"*": P(None, "data")}}, "parameter down/bias .* has 1 axes, and .* is for 2"),
])  # fmt: skip
def test_rules_that_do_not_fit_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _trained(**options)


def test_gradients_of_what_is_cut_are_scattered_with_the_users_lines_and_modules() -> None:
    """Data parallel, parameters cut: the sum of a gradient of which a chip keeps a part; flax's own names of axes say which."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            cut_by_columns = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(16, kernel_init=cut_by_columns, use_bias=False, name="first")(x)

    model, x = Model(), floats(16, 32)
    boxed = jax.eval_shape(model.init, jax.random.key(0), x)
    lies = jax.tree.map(lambda spec: cut(*spec), nn.get_partition_spec(boxed))
    gradient = jax.grad(lambda p, x: jnp.mean(jnp.square(model.apply(p, x))))  # type: ignore[arg-type]
    step = tpuflow.jit(gradient, in_shardings=(lies, cut("model")), out_shardings=lies)
    parameters = {"params": {"first": {"kernel": floats(32, 16)}}}
    rows = step.lower(parameters, x).compile().time().collectives
    assert [(row.kind, row.scope) for row in rows] == [
        ("all_gather", "jvp(Model)/first"),
        ("reduce_scatter", "transpose(jvp(Model))/first"),
    ]
    assert all(row.source.startswith("test_partitioned_training.py:") for row in rows)
    expected = jax.jit(gradient)(parameters, x)
    np.testing.assert_allclose(step(parameters, x)["params"]["first"]["kernel"], expected["params"]["first"]["kernel"], **CLOSE)
