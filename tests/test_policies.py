"""The precision policies as documented: types of products and of batch normalisation, loss scales, and equal bits on both engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tpuflow
from models.norm import BatchNorm
from tests import tolerances
from tpuflow import amp
from tpuflow.errors import ConfigError
from tpuflow.jaxprs.compat import inner_jaxprs
from tpuflow.training.config import StepConfig
from tpuflow.training.preparing import make_recipe
from tpuflow.training.train_step import Recipe, TrainState

F32, F16, BF16 = "float32", "float16", "bfloat16"
NO_SCALE = amp.LossScale()

TABLE = {
    #              parameters, compute, batch norm, loss, casts, loss scale
    "fp32": (F32, F32, F32, F32, "none", NO_SCALE),
    "O0": (F32, F32, F32, F32, "none", NO_SCALE),
    "fp16": (F16, F16, F16, F16, "all", NO_SCALE),
    "mixed": (F32, F16, F32, F16, "list", amp.LossScale("dynamic", 2.0**16, 2.0, 0.5, 2000)),
    "O2": (F32, F16, F32, F32, "all", amp.LossScale("dynamic", 2.0**24, 2.0, 0.5, 2000, smallest=1.0)),
    "O3": (F32, F16, F16, F32, "all", amp.LossScale("static", 1024.0)),
    "bf16": (BF16, BF16, BF16, F32, "all", NO_SCALE),
    "mixed_bf16": (F32, BF16, F32, F32, "list", NO_SCALE),
}


class PlainNorm(nn.Module):
    """Batch normalisation without a conversion of its own: its arithmetic shows the type that the policy gives it."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        scale = self.param("gamma", nn.initializers.ones, (x.shape[-1],))
        running = self.variable("batch_stats", "power", jnp.ones, (x.shape[-1],))
        power = jnp.square(x).mean((0, 1, 2)) if train else running.value.astype(x.dtype)
        if train and not self.is_initializing():
            running.value = 0.9 * running.value + 0.1 * power
        return x * (scale * jax.lax.rsqrt(power + 1e-3).astype(scale.dtype)).astype(x.dtype)


class SmallNet(nn.Module):
    """Two convolutions with batch normalisation, a dense layer: [B, 6, 6, 2] -> [B, 3]."""

    norm: Callable[[str], nn.Module]

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.relu(self.norm("first")(nn.Conv(4, (3, 3), use_bias=False)(x), train))
        x = nn.relu(self.norm("second")(nn.Conv(4, (1, 1), use_bias=False)(x), train))
        return nn.Dense(3, name="head")(x.mean((1, 2)))


def images(samples: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Three classes, told by which channel is brighter."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, samples)
    tint = np.array([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])[labels][:, None, None, :]
    return (rng.normal(size=(samples, 6, 6, 2)) + tint).astype(np.float32), labels.astype(np.int32)


def recipe_and_state(model: Any, policy: str, **changes: Any) -> tuple[Recipe, TrainState]:
    """The training step of a model, and where it starts."""
    batch = images(4)
    recipe, _ = make_recipe(StepConfig(model, batch, policy, optax.sgd(0.1), **changes), batch)
    params, carried = recipe.model.init(jax.random.key(0), recipe.roles.inputs(batch))
    return recipe, recipe.initial_state(params, carried, None)


def equations(jaxpr: Any, *primitives: str) -> list[Any]:
    """Every equation of these primitives, nested jaxprs included."""
    found = [e for e in jaxpr.eqns if e.primitive.name in primitives]
    for eqn in jaxpr.eqns:
        for sub in inner_jaxprs(eqn):
            found += equations(sub, *primitives)
    return found


@functools.cache
def step_of(model: nn.Module, policy: str, **changes: Any) -> Any:
    """The jaxpr of one whole training step, backward pass included."""
    recipe, state = recipe_and_state(model, policy, **changes)
    return jax.make_jaxpr(recipe.train_step)(state, images(4)).jaxpr


def types_of(model: nn.Module, policy: str, *primitives: str, **changes: Any) -> set[str]:
    """Types of the floating operands of some primitives in `step_of`."""
    found = equations(step_of(model, policy, **changes), *primitives)
    return {str(v.aval.dtype) for e in found for v in e.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)}


def plain(name: str) -> nn.Module:
    return PlainNorm(name=name)


def fit(policy: str = "O3", **options: Any) -> tpuflow.TrainResult:
    """Ten steps of the small network."""
    options = {"model": SmallNet(lambda name: BatchNorm(name=name)), "data": images(), "optimizer": optax.sgd(0.1, momentum=0.9), **options}
    return tpuflow.train(policy=policy, batch_size=8, progress=False, **options)


def test_the_table_of_policies_is_the_documented_one():
    rows = {name: (p.param_dtype, p.compute_dtype, p.norm_dtype, p.loss_dtype, p.casts, p.loss_scale) for name, p in amp.POLICIES.items()}
    assert rows == TABLE


@pytest.mark.parametrize("policy", TABLE)
def test_every_product_takes_the_compute_type_forward_and_backward(policy):
    assert types_of(SmallNet(plain), policy, "dot_general", "conv_general_dilated") == {TABLE[policy][1]}


@pytest.mark.parametrize("policy", TABLE)
def test_batch_normalisation_computes_in_its_own_type(policy):
    assert types_of(SmallNet(plain), policy, "rsqrt") == {TABLE[policy][2]}


@pytest.mark.parametrize(("policy", "keep", "wanted"), [("O2", False, F16), ("O3", True, F32), ("fp16", True, F32), ("bf16", True, F32)])
def test_keep_batchnorm_fp32_overrides_the_row(policy, keep, wanted):
    model = SmallNet(plain)
    assert types_of(model, policy, "rsqrt", keep_batchnorm_fp32=keep) == {wanted}
    assert types_of(model, policy, "dot_general", "conv_general_dilated", keep_batchnorm_fp32=keep) == {TABLE[policy][1]}


def _seen_by(base: type, record: list[tuple[str, str]]) -> type:
    """A kind of normalisation that notes the types of its inputs and of its scale whenever it is traced."""

    def __call__(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        y = base.__call__(self, x, *args, **kwargs)
        scale = self.scale[...] if isinstance(self, nnx.Module) else self.variables["params"]["scale"]
        record.append((str(x.dtype), str(scale.dtype)))
        return y

    return type("Anything", (base,), {"__call__": __call__})


class WithNnxNorm(nnx.Module):
    def __init__(self, norm: Any, rngs: nnx.Rngs):
        self.conv, self.parts = nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.List([norm(4, rngs=rngs)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.parts[0](self.conv(x)).mean((1, 2)))


def _with_norm(kind: str, record: list[tuple[str, str]]) -> Any:
    if kind == "models":
        seen = _seen_by(BatchNorm, record)
        return SmallNet(lambda name: seen(name=name))
    if kind == "nnx":
        return WithNnxNorm(_seen_by(nnx.BatchNorm, record), nnx.Rngs(0))
    seen = _seen_by({"linen": nn.BatchNorm, "linen layer norm": nn.LayerNorm}[kind], record)
    options = {"use_running_average": False} if kind == "linen" else {}

    class OneNorm(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3)(seen(**options)(nn.Conv(4, (3, 3))(x)).mean((1, 2)))

    return OneNorm()


@pytest.mark.parametrize("kind", ["models", "linen", "nnx"])
@pytest.mark.parametrize(("policy", "wanted"), [("O2", F32), ("O3", F16), ("fp16", F16)])
def test_any_layer_with_running_statistics_is_batch_normalisation(kind, policy, wanted):
    record: list[tuple[str, str]] = []
    recipe, state = recipe_and_state(_with_norm(kind, record), policy)
    record.clear()
    jaxpr = jax.make_jaxpr(recipe.train_step)(state, images(4)).jaxpr
    assert record[0] == (wanted, wanted)  # then it is traced once more, uncast, for the types of its results
    products = equations(jaxpr, "dot_general", "conv_general_dilated")
    assert {str(v.aval.dtype) for e in products for v in e.invars} == {F16}


def test_layer_normalisation_is_not_kept_in_fp32():
    record: list[tuple[str, str]] = []
    recipe, state = recipe_and_state(_with_norm("linen layer norm", record), "O2")
    record.clear()
    jax.make_jaxpr(recipe.train_step)(state, images(4))
    assert record[0] == (F16, F16)


def test_parameters_are_stored_as_the_row_says_and_statistics_in_fp32():
    def stored(policy: str, **changes: Any) -> dict[str, str]:
        params = recipe_and_state(SmallNet(plain), policy, **changes)[1].params
        return {"norm": str(params["first"]["gamma"].dtype), "dense": str(params["head"]["kernel"].dtype)}

    assert stored("O2") == stored("O3") == stored("mixed") == {"norm": F32, "dense": F32}
    assert stored("fp16") == {"norm": F16, "dense": F16}
    assert stored("fp16", keep_batchnorm_fp32=True) == {"norm": F32, "dense": F16}
    for policy in ("O2", "O3"):
        recipe, state = recipe_and_state(SmallNet(plain), policy)
        carried = jax.eval_shape(recipe.train_step, state, images(4))[0].carried
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(carried)} == {F32}


def test_running_statistics_under_o3_are_not_rounded_to_fp16():
    recipe, state = recipe_and_state(SmallNet(plain), "O3")
    fine = jax.tree.map(lambda s: jnp.full_like(s, 1.0001), state.carried)
    after = jax.jit(recipe.train_step)(state._replace(carried=fine), images(4))[0].carried
    before = jax.jit(recipe.train_step)(state, images(4))[0].carried
    gained = jax.tree.map(lambda a, b: np.asarray(a - b), after, before)
    np.testing.assert_allclose(np.concatenate([g.ravel() for g in jax.tree.leaves(gained)]), 0.9e-4, rtol=2e-2)


@pytest.mark.parametrize(("policy", "keep"), [("mixed", False), ("mixed_bf16", False)])
def test_a_policy_by_list_cannot_narrow_batch_normalisation(policy, keep):
    with pytest.raises(ConfigError, match="batch normalisation cannot be kept in"):
        amp.get_policy(policy).adjusted(keep_batchnorm_fp32=keep)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, TABLE["O3"][-1]),
        (128, amp.LossScale("static", 128.0)),
        ("dynamic", amp.LossScale("dynamic", 2.0**16)),
        ("none", NO_SCALE),
        (amp.LossScale("static", 8.0, drop_overflow_update=False), amp.LossScale("static", 8.0, drop_overflow_update=False)),
    ],
)
def test_a_given_loss_scale_replaces_the_rows(given, wanted):
    assert amp.get_policy("O3").adjusted(loss_scale=given).loss_scale == wanted


@pytest.mark.parametrize("bad", ["dynamc", True, 0.0, -2.0, float("inf"), [1024]])
def test_what_is_no_loss_scale_is_refused(bad):
    with pytest.raises(ConfigError, match="loss scale"):
        amp.get_policy("O3").adjusted(loss_scale=bad)


def test_a_dynamic_scale_must_drop_updates_that_overflow():
    with pytest.raises(ConfigError, match="drop_overflow_update"):
        amp.LossScale("dynamic", drop_overflow_update=False)


def _overflowing(optimizer: Any) -> tuple[Any, Any]:
    """Parameters and state after one good and one overflowing update."""
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for gradient in (1.0, np.inf):
        updates, state = optimizer.update({"w": jnp.full(2, gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    return params, amp.find_state(state)


def test_a_static_scale_skips_an_overflow_only_if_it_is_to_be_dropped():
    params, state = _overflowing(amp.static_loss_scale(optax.sgd(1.0), 4.0))
    assert params["w"].tolist() == [0.75, 0.75] and (int(state.skipped), float(state.scale)) == (1, 4.0)
    params, state = _overflowing(amp.static_loss_scale(optax.sgd(1.0), 4.0, drop_overflow_update=False))
    assert params["w"].tolist() == [-np.inf, -np.inf] and int(state.skipped) == 0 and not bool(state.last_finite)


def test_mindspores_dynamic_scale_does_not_fall_below_one():
    optimizer = amp.with_loss_scale(optax.sgd(1.0), amp.MINDSPORE_DYNAMIC)
    state = optimizer.init({"w": jnp.ones(1)})
    scales = []
    for _ in range(27):
        scales.append(float(state.scale))
        _, state = optimizer.update({"w": jnp.array([np.nan])}, state)
    assert scales == [*(2.0**n for n in range(24, -1, -1)), 1.0, 1.0]


def test_fp16_parameters_with_a_loss_scale_keep_an_fp32_optimizer_state():
    optimizer = amp.static_loss_scale(optax.adam(0.1), 8.0)
    params = {"w": jnp.ones(2, jnp.float16)}
    state = optimizer.init(params)
    after = optimizer.update({"w": jnp.ones(2, jnp.float16)}, state, params)[1]
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [leaf.dtype for leaf in jax.tree.leaves(after)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["O2", "O3"])
def test_ten_steps_on_both_engines_agree_in_every_bit_and_stay_near_fp32(policy):
    scale = {"loss_scale": amp.LossScale("dynamic", 2.0**17, smallest=1.0)} if policy == "O2" else {}
    fast, reference = fit(policy, fidelity="bitexact", **scale), fit(policy, engine="reference", **scale)
    assert fast.history == reference.history and fast.steps == 10
    for a, b in zip(*(jax.tree.leaves((r.params, r.carried, r.opt_state)) for r in (fast, reference)), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    skipped = fast.skipped_steps
    assert skipped == list(range(len(skipped))) and len(skipped) < 8
    scales = fast.history[0]["loss_scale"]
    assert scales == ([1024.0] * 10 if policy == "O3" else [2.0 ** (17 - min(i, len(skipped))) for i in range(10)])
    if policy == "O3":
        exact = fit("fp32")
        np.testing.assert_allclose(fast.losses, exact.losses, atol=tolerances.O3_LOSSES)
        assert fast.losses != exact.losses


def _initial_params() -> Any:
    return SmallNet(lambda name: BatchNorm(name=name)).init(jax.random.key(5), jnp.zeros((8, 6, 6, 2)))["params"]


@pytest.mark.slow
def test_clipping_and_weight_decay_see_unscaled_gradients():
    def trained(**options: Any) -> tpuflow.TrainResult:
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))
        x, y = images(24)
        return fit("fp32", model=nn.Dense(3), data=(x.reshape(24, -1), y), optimizer=optimizer, fidelity="bitexact", **options)

    one_by_one, scaled = trained(), trained(loss_scale=2.0**10)
    assert scaled.history[0]["loss_scale"] == [1024.0] * 3 and scaled.losses == one_by_one.losses
    for a, b in zip(jax.tree.leaves(one_by_one.params), jax.tree.leaves(scaled.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_reaches_the_optimizer_is_unscaled_and_fp32_under_every_master_weight_policy():
    seen: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        seen.append(updates)
        return updates, state

    watch = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    for policy in ("mixed", "O2", "O3"):
        optimizer = amp.with_loss_scale(watch, amp.get_policy(policy).loss_scale)
        state = optimizer.init({"w": jnp.ones(2)})
        scale = float(amp.find_state(state).scale)
        optimizer.update({"w": jnp.array([0.25, -3.0]) * scale}, state, {"w": jnp.ones(2)})
        assert seen[-1]["w"].dtype == jnp.float32 and seen[-1]["w"].tolist() == [0.25, -3.0]


@pytest.mark.slow
def test_weight_decay_spares_biases_and_batch_normalisation_by_a_mask():
    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    decay = optax.chain(optax.add_decayed_weights(0.5, mask=matrices), optax.sgd(0.1))
    start = _initial_params()
    result = fit("O3", optimizer=decay, params=start, data=images(8), loss=lambda outputs, labels: 0.0 * outputs.sum(-1))
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(after, before * (0.95 if before.ndim > 1 else 1.0), rtol=1e-6)
