"""`tpuflow.nnx.jit` does to nnx objects what `flax.nnx.jit` does, on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpuflow
from tpuflow.errors import ConfigError

RTOL = 2e-5
"""Sums in another order, over five steps of SGD."""
X = np.random.default_rng(0).standard_normal((32, 8), np.float32)
Y = np.random.default_rng(1).integers(0, 3, 32).astype(np.int32)


class Net(nnx.Module):
    """Everything whose state changes in a step: statistics, dropout's counters, parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def train_step(model: Net, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, x: jax.Array, y: jax.Array) -> jax.Array:
    """A step as flax's own examples write it."""

    def loss_fn(model: Net) -> tuple[jax.Array, jax.Array]:
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=y)
    optimizer.update(model, gradients)
    return loss


def training() -> tuple[Net, nnx.Optimizer, nnx.MultiMetric]:
    model = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), metrics


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Every array of nnx objects by its path; random keys as their words."""
    found = jax.tree_util.tree_leaves_with_path(nnx.state(tree))
    words = ((p, jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for p, x in found)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in words}


def objects(tree: Any) -> dict[Any, int]:
    """The identity of every nnx object by its path."""
    return {path: id(part) for path, part in nnx.iter_graph(tree) if isinstance(part, nnx.Pytree | nnx.Variable)}


def assert_same(ours: Any, flax: Any, rtol: float = RTOL, atol: float = 1e-6) -> None:
    one, other = leaves(ours), leaves(flax)
    assert one.keys() == other.keys()
    for path in other:
        assert one[path].dtype == other[path].dtype, path
        np.testing.assert_allclose(one[path], other[path], rtol=rtol, atol=atol, err_msg=path)


def counted(fun: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """A function, and a list that grows by one whenever it is traced."""
    traced: list[int] = []

    def fun_and_count(*args: Any, **kwargs: Any) -> Any:
        traced.append(1)
        return fun(*args, **kwargs)

    return fun_and_count, traced


@pytest.mark.slow
def test_a_training_updates_model_optimizer_and_metrics_in_place_as_flax_does():
    step, traced = counted(train_step)
    ours, flax = training(), training()
    before = objects(ours)
    jit, flax_jit = tpuflow.nnx.jit(step), nnx.jit(train_step)
    losses = [(float(jit(*ours, X, Y)), float(flax_jit(*flax, X, Y))) for _ in range(5)]
    assert len(traced) == 1, "compiled once"
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=RTOL)
    assert losses[-1][0] < losses[0][0] and int(ours[1].step[...]) == 5
    assert_same(ours, flax)
    assert ours[2].compute()["accuracy"] == pytest.approx(float(flax[2].compute()["accuracy"]))
    assert objects(ours) == before, "the very same objects"
    ours[2].reset()
    jit(*ours, X, Y)
    assert len(traced) == 1


def test_a_changed_graph_or_shape_is_compiled_anew_and_a_known_one_is_not():
    forward, traced = counted(lambda model, x: model(x))
    jit, model = tpuflow.nnx.jit(forward), Net(nnx.Rngs(0))
    jit(model, X)
    model.eval()
    np.testing.assert_allclose(jit(model, X), model(X), rtol=RTOL, atol=1e-6)
    assert len(traced) == 2, "dropout is off: another graph definition"
    jit(model, X[:8])
    assert len(traced) == 3
    model.train()
    jit(model, X)
    assert len(traced) == 3, "the first one again"
    model.last = nnx.Linear(16, 5, rngs=nnx.Rngs(1))
    assert jit(model, X).shape == (32, 5) and len(traced) == 4


def test_other_objects_of_the_same_graph_take_the_same_program():
    forward, traced = counted(lambda model, x: model(x))
    jit = tpuflow.nnx.jit(forward)
    for seed in (0, 1):
        model = nnx.Linear(8, 2, rngs=nnx.Rngs(seed))
        np.testing.assert_allclose(jit(model, X), model(X), rtol=RTOL, atol=1e-6)
    assert len(traced) == 1


def _share(first: nnx.Linear, both: dict[str, Any], x: jax.Array) -> jax.Array:
    first.kernel[...] += 1.0
    return both["again"](x) + both["other"][0](x)


def _grow(model: nnx.Linear, x: jax.Array) -> jax.Array:
    model.calls = nnx.Variable(jnp.float32(1.0))
    model.note = "grown"
    return model(x)


def _sow(model: nnx.Linear, x: jax.Array) -> tuple[jax.Array, nnx.State]:
    def call(model: nnx.Linear, x: jax.Array) -> jax.Array:
        model.sow(nnx.Intermediate, "hidden", x.sum())
        return model(x)

    return nnx.capture(call, nnx.Intermediate)(model, x)


def _make(rngs: nnx.Rngs, x: jax.Array) -> tuple[nnx.Linear, nnx.Rngs, jax.Array]:
    model = nnx.Linear(8, 2, rngs=rngs)
    return model, rngs, model(x)


def _linear() -> nnx.Linear:
    return nnx.Linear(8, 2, rngs=nnx.Rngs(0))


def _shared() -> tuple[Any, ...]:
    model = _linear()
    return model, {"again": model, "other": [_linear()]}


OBJECTS = {
    "one object in several arguments": (_share, _shared),
    "attributes that the function adds": (_grow, lambda: (_linear(),)),
    "values that the function sows": (_sow, lambda: (_linear(),)),
    "a module made in the function": (_make, lambda: (nnx.Rngs(3, params=4),)),
    "a variable alone": (lambda v, x: v.set_value(v[...] + x.sum()), lambda: (nnx.Variable(jnp.float32(2.0)),)),
    "metrics alone": (lambda m, x: m.update(values=x), lambda: (nnx.metrics.Average(),)),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_come_back_as_from_flax(case: str):
    fun, make = OBJECTS[case]
    ours, flax = make(), make()
    jit, flax_jit = tpuflow.nnx.jit(fun), nnx.jit(fun)
    for _ in range(2):
        results = jit(*ours, X), flax_jit(*flax, X)
        assert_same((ours, results[0]), (flax, results[1]))
        assert nnx.graphdef((ours, results[0])) == nnx.graphdef((flax, results[1])), "the same structure, identities and static attributes"


def _bias(model: nnx.Linear, x: jax.Array) -> jax.Array:
    model.bias[...] += x.sum()
    return model(x)


Jit = Callable[..., Any]
COMPOSED: dict[str, Callable[[Jit], Callable[..., Any]]] = {
    "in itself, twice": lambda jit: jit(lambda m, x: jit(_bias)(m, x) + jit(_bias)(m, x)),
    "in flax's": lambda jit: nnx.jit(lambda m, x: jit(_bias)(m, x)),
    "around flax's": lambda jit: jit(lambda m, x: nnx.jit(_bias)(m, x)),
    "in flax's grad": lambda jit: nnx.grad(lambda m, x: jit(_bias)(m, x).sum()),
    "around flax's scan": lambda jit: jit(
        lambda m, x: nnx.scan(lambda c, m: (m(c) @ jnp.ones((2, 8)), c.sum()), length=3, in_axes=(nnx.Carry, None))(x, m)[1]
    ),
    "around flax's vmap": lambda jit: jit(lambda m, x: nnx.vmap(lambda m, row: m(row), in_axes=(None, 0))(m, x)),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_it_composes_with_itself_and_with_flax_as_flax_does(case: str):
    ours, flax = _linear(), _linear()
    results = [COMPOSED[case](jit)(model, X[:4]) for jit, model in ((tpuflow.nnx.jit, ours), (nnx.jit, flax))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *results)
    assert_same(ours, flax)


@pytest.mark.parametrize("transformed", [jax.grad, jax.jit, jax.vmap], ids=lambda t: t.__name__)
def test_an_object_that_cannot_be_updated_is_refused_before_it_is_taken_apart(transformed: Callable[..., Any]):
    model = _linear()
    jit = tpuflow.nnx.jit(lambda m, x: m(x).sum())
    with pytest.raises(ValueError, match="different trace level"):
        transformed(lambda x: jit(model, x))(X[:4])
    assert model(X[:4]).shape == (4, 2), "flax's own has lost its parameters by then"


def test_a_result_that_is_an_argument_is_the_callers_own_object():
    model = _linear()
    same, inner = tpuflow.nnx.jit(lambda m: (m, {"kernel": m.kernel}))(model)
    assert same is model and inner["kernel"] is model.kernel


def test_methods_and_static_arguments_and_keywords():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.int32(0))

        @tpuflow.nnx.jit(static_argnames="by")
        def add(self, by: int, x: jax.Array) -> jax.Array:
            self.count[...] += by
            return x * by

    counter = Counter()
    assert float(counter.add(3, x=jnp.float32(2))) == 6 and float(counter.add(by=4, x=jnp.float32(2))) == 8
    assert int(counter.count[...]) == 7


def test_a_bound_method_is_refused():
    with pytest.raises(ConfigError, match="bound to a Net, whose changes could not come back; decorate the method in its class"):
        tpuflow.nnx.jit(Net(nnx.Rngs(0)).__call__)


def test_a_policy_computes_in_its_type_and_keeps_the_objects_own():
    (wide, *_), (narrow, *_) = training(), training()
    options: dict[str, Any] = {"chip": "tpu-v4", "policy": "mixed_bf16"}
    jit = tpuflow.nnx.jit(lambda model, x: model(x), **options)
    outputs = jit(narrow, X), tpuflow.nnx.jit(lambda model, x: model(x))(wide, X)
    assert_same(narrow, wide, rtol=2e-2, atol=1e-4)
    difference = np.abs(np.asarray(outputs[0]) - np.asarray(outputs[1])).max()
    assert 0 < difference < 0.05, "bfloat16 has three digits"
    assert jit.program(narrow, X).chip.name == "tpu-v4" and "tpu-v4" in repr(jit)


@pytest.mark.slow
def test_engines_agree_bit_for_bit_and_donated_objects_are_replaced():
    found = []
    for engine in ("fast", "reference"):
        ours = training()
        step = tpuflow.nnx.jit(train_step, engine=engine, fidelity="bitexact", donate_argnums=(0, 1))
        losses = [float(step(*ours, X, Y)) for _ in range(2)]
        found.append((losses, leaves(ours)))
    assert found[0][0] == found[1][0]
    assert all(found[0][1][path].tobytes() == array.tobytes() for path, array in found[1][1].items())


def test_a_step_that_fails_leaves_its_objects_as_they_were():
    ours = training()
    jit = tpuflow.nnx.jit(train_step)
    before = leaves(ours)
    with pytest.raises(TypeError, match="dot_general"):
        jit(*ours, X[:, :5], Y)
    assert all((array == before[path]).all() for path, array in leaves(ours).items())
    assert np.isfinite(jit(*ours, X, Y))


def test_what_a_function_leaves_unchanged_stays_where_it_is():
    """Only what was changed is a result of the Program: an inference must not copy the model's parameters."""
    model = Net(nnx.Rngs(0))
    forward = tpuflow.nnx.jit(lambda m, x: m(x))
    program = forward.program(model, X)
    assert [p.shape for p in program.outputs] == [(16,), (16,), (), (32, 3)], "two statistics, dropout's counter, the result"
    kernel, mean = model.first.kernel[...], np.asarray(model.norm.mean[...])
    forward(model, X)
    assert model.first.kernel[...] is kernel and (np.asarray(model.norm.mean[...]) != mean).any()
    donating = tpuflow.nnx.jit(lambda m, x: m(x), donate_argnums=0)
    kernel = np.asarray(kernel)
    assert len(donating.program(model, X).outputs) == len(jax.tree.leaves(nnx.state(model))) + 1
    donating(model, X)
    assert (np.asarray(model.first.kernel[...]) == kernel).all(), "given away, and back"


def test_lowering_changes_nothing_and_says_what_the_step_costs():
    ours = training()
    before = leaves(ours)
    compiled = tpuflow.nnx.jit(train_step).lower(*ours, X, Y).compile()
    assert all((array == before[path]).all() for path, array in leaves(ours).items())
    assert compiled.cost_analysis()["matrix flops"] == 2 * 32 * (8 * 16 * 2 + 16 * 3 * 3)
    assert {"parameters", "optimizer"} <= set(compiled.profile().memory.peak_by_category)
    assert compiled.memory_analysis().argument_size_in_bytes > 4 * sum(x.size for x in jax.tree.leaves(nnx.state(ours[0], nnx.Param)))
