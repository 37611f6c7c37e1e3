"""tpuflow.check_numerics: planted faults are found and named, figures are those of NumPy, and the step is the one that trains."""

from __future__ import annotations

import functools
import json
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuflow
from tpuflow.errors import ConfigError, DataError
from tpuflow.jaxprs.walk import walk
from tpuflow.numerics import measures, operations, scales
from tpuflow.numerics.functions import measure_function
from tpuflow.numerics.report import timeline
from tpuflow.numerics.rows import figures_of
from tpuflow.numerics.scopes import place_of
from tpuflow.stages.staging import Target

RNG = np.random.default_rng(0)
BATCH = (RNG.normal(size=(8, 6)).astype(np.float32), np.arange(8) % 3)


def line_of(mark):
    """This file's line with such a comment, as reports write it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"test_numerics.py:{number} "


class Scaled(nn.Module):
    """A layer that multiplies by a constant, in the type of its input."""

    factor: float

    @nn.compact
    def __call__(self, x):
        return x * jnp.asarray(self.factor, x.dtype)  # scaled


class Net(nn.Module):
    """Dense layers with something between them: [B, 6] -> [B, 3]."""

    before: float = 1.0
    after: float = 1.0

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="first")(x))
        x = Scaled(self.before, name="shrink")(x)
        x = Scaled(self.after, name="grow")(x)
        return nn.Dense(3, name="last")(x)


class Looped(nn.Module):
    """A product that a loop makes three times, between dense layers."""

    factor: float = 1.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="first")(x)
        factor = jnp.asarray(self.factor, x.dtype)
        x, _ = jax.lax.scan(lambda carry, _: (carry * factor, None), x, None, length=3)  # looped
        return nn.Dense(3, name="last")(x)


def check(model=None, policy="fp16", **options):
    return tpuflow.check_numerics(Net() if model is None else model, BATCH, policy, optimizer=optax.sgd(1e-3), **options)


@pytest.fixture(scope="module")
def healthy():
    """A step in which nothing goes wrong, in four precisions."""
    return check(policy=("fp32", "fp16", "bf16", "mixed"))


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_overflow_in_the_forward_pass_is_named_with_its_layer_and_line():
    first = check(Net(after=60000.0)).first_nonfinite
    assert (first.layer, first.phase, first.tensor, first.primitive) == ("grow", "forward", "activation", "mul")
    assert first.source.startswith(line_of("scaled"))
    assert first.inf > 0


@pytest.mark.slow
def test_an_underflow_in_the_backward_pass_is_named_with_its_layer_and_line():
    report = check(Net(before=2.0**-22), params=big_params())
    assert report.row("shrink", "activation").underflow == 0
    assert report.row("shrink", "activation gradient").underflow_share > 0.3
    worst = report.underflows[0]
    assert (worst.layer, worst.phase, worst.primitive) == ("shrink", "backward", "mul")
    assert worst.source.startswith(line_of("scaled"))


def big_params():
    """Weights whose activations survive a factor of 2^-22 in fp16."""
    params = Net().init(jax.random.key(0), BATCH[0])["params"]
    return {**params, "first": jax.tree.map(lambda p: 1024 * p, params["first"])}


def test_a_division_by_zero_in_the_loss_is_named_with_its_line():
    def loss(outputs, labels):
        nobody = jnp.sum(labels < 0)
        return jnp.sum(outputs**2) / nobody  # divided

    first = check(loss=loss, policy="fp32").first_nonfinite
    assert (first.layer, first.phase, first.primitive) == ("loss", "forward", "div")
    assert first.source.startswith(line_of("divided"))


@pytest.mark.slow
def test_the_trip_of_a_loop_that_overflows_first_is_told():
    first = check(Looped(factor=200.0)).first_nonfinite
    assert first.primitive == "mul"
    assert first.trip == 2
    assert first.source.startswith(line_of("looped"))


@pytest.mark.slow
def test_a_scale_that_the_loss_type_does_not_hold_overflows_where_the_loss_is_differentiated(healthy):
    report = healthy["mixed"]
    first = report.first_nonfinite
    assert report.skipped == (True,)
    assert (first.layer, first.phase, first.primitive, first.dtype) == ("loss", "backward", "convert_element_type", "float16")
    assert report.all_updates is None
    assert "skipped for overflow" in str(report)


def test_a_mask_of_infinities_is_no_fault():
    def loss(outputs, labels):
        masked = jnp.where(jnp.arange(3) == 2, -jnp.inf, outputs)
        return -jax.nn.log_softmax(masked)[:, 0]

    report = check(loss=loss, policy="fp32")
    assert report.nonfinite > 0
    assert report.first_nonfinite is None


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_step_is_the_one_that_trains_and_its_lost_updates_are_the_parameters_that_stay():
    params = Net().init(jax.random.key(1), BATCH[0])["params"]
    report = check(policy="fp16", params=params, fidelity="bitexact")
    options = {"optimizer": optax.sgd(1e-3), "batch_size": 8, "progress": False, "fidelity": "bitexact"}
    trained = tpuflow.train(Net(), BATCH, "fp16", params=params, **options)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(trained.params), strict=True)
    kept = [int(np.sum(np.asarray(a).astype(np.float16) == np.asarray(b))) for a, b in pairs]
    assert list(report.losses) == trained.losses
    assert [u.lost + u.elements - u.with_gradient for u in report.updates] == kept
    assert report.all_updates.lost_share > 0.5
    assert "of the parameter updates round to nothing" in str(report)


def test_fp32_loses_nothing_and_fp16_loses_updates(healthy):
    lost = {report.policy: report.all_updates.lost_share for report in healthy if report.policy != "mixed"}
    assert lost["fp32"] < 0.05 < 0.3 < lost["fp16"] <= lost["bf16"]


def test_every_layer_has_its_activations_gradients_parameters_and_updates(healthy):
    kinds = {"activation", "activation gradient", "parameter", "parameter gradient", "update"}
    for layer in ("first", "last"):
        assert {r.tensor for r in healthy["fp16"].rows if r.layer == layer} == kinds
    assert {r.layer for r in healthy["fp16"].rows} >= {"first", "shrink", "grow", "last", "loss", "optimizer"}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_figures_count_what_is_in_an_array(dtype):
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    values = np.array([0.0, -0.0, 1.0, -3.0, tiny, tiny / 2, np.inf, -np.inf, np.nan, 0.0], np.float64).astype(dtype)
    nonzero = np.array([True] + 9 * [False])
    finite = np.array(6 * [True] + [True, False, True, True])
    counts = measures.tally(values, lambda: nonzero, lambda: finite)
    assert figures_of(counts, str(np.dtype(dtype))) == {
        "elements": 10, "zeros": 3, "inf": 2, "nan": 1, "subnormal": 1, "underflow": 1, "largest": 3.0, "smallest": tiny / 2,
    }  # fmt: skip
    assert counts.born == 2
    for nothing in (values[:2], values[6:9], values[:0]):
        found = figures_of(measures.tally(nothing), str(np.dtype(dtype)))
        assert (found["elements"], found["largest"], found["smallest"]) == (nothing.size, 0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=20), st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=5))
def test_a_census_counts_the_finite_magnitudes_above_each_threshold(values, thresholds):
    x = np.array(values, np.float32)
    bits = [measures.bits_of_number(t, "float32") for t in thresholds]
    above = [int(np.sum(np.isfinite(x) & (np.abs(x) > t))) for t in np.array(thresholds, np.float32)]
    assert measures.tally(x, thresholds=bits).census.tolist() == above


def measured(function, *arrays):
    """The operations of a function in fp32."""
    return measure_function(jax.make_jaxpr(function)(*arrays), arrays, "function", "fp32", Target(tpuflow.get_chip("generic"))).operations


def test_trips_of_loops_are_counted_in_the_order_in_which_they_run():
    def products(up, down):
        first = jax.lax.scan(lambda carry, x: (carry * x, carry), jnp.float32(1), up)
        return first, jax.lax.scan(lambda carry, x: (carry * x, carry), jnp.float32(1), down, reverse=True)

    up, down = np.array([1e19, 1e20, 1, 1], np.float32), np.array([1, 1e10, 1e20, 1e15], np.float32)
    found = measured(products, up, down)
    assert [(o.primitive, o.elements, o.inf, o.trip) for o in found] == [("mul", 4, 3, 1), ("mul", 4, 2, 2)]


def test_what_is_compiled_does_not_grow_with_the_number_of_equal_layers():
    def layers(number):
        return lambda x, w: functools.reduce(lambda x, _: jnp.tanh(x @ w), range(number), x)

    x = np.eye(7, dtype=np.float32)
    before = operations._compiled.cache_info().misses
    assert [len(measured(layers(number), x, x)) for number in (2, 5)] == [4, 10]
    assert operations._compiled.cache_info().misses == before + 2


@pytest.mark.parametrize(("chips", "primitives"), [(1, ["sin", "psum_invariant", "mul"]), (4, ["shard_map", "mul"])])
def test_shards_of_one_chip_are_measured_inside_and_those_of_several_by_their_results(chips, primitives):
    mesh, x = jax.sharding.AbstractMesh((chips,), ("i",)), np.ones((4, 3), np.float32)
    summed = jax.shard_map(lambda x: jax.lax.psum(jnp.sin(x), "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
    found = measured(lambda x: summed(x) * 2, x)
    assert [o.primitive for o in found] == primitives
    assert found[-1].largest == pytest.approx(2 * chips * np.sin(1))


def test_a_walk_lets_go_of_values_after_their_last_use():
    class Value:
        """Something that can be watched."""

    alive = weakref.WeakSet()

    def made(*_):
        alive.add(value := Value())
        return value

    most = []

    def step(equation, operands):
        most.append(len(alive))
        return [made()]

    closed = jax.make_jaxpr(lambda x: functools.reduce(lambda y, _: jnp.sin(y) + 1.0, range(10), x))(1.0)
    walk(closed, [made()], step, made)
    assert max(most) <= 3


@settings(max_examples=60, deadline=None)
@given(st.floats(2.0**-60, 2.0**30, width=32), st.sampled_from(scales.SCALES))
def test_the_limits_of_a_loss_scale_are_those_of_rounding_to_fp16(gradient, scale):
    smallest, _, infinite = scales.limits("float16", scale)
    with np.errstate(over="ignore"):
        rounded = np.float16(np.float64(gradient) * scale)
    assert (rounded != 0) == (gradient > smallest)
    assert np.isinf(rounded) == (gradient > infinite)


def test_a_larger_loss_scale_never_turns_more_gradients_to_zero(healthy):
    rows = healthy["fp16"].scales
    zeros = [r.gradients - r.kept - r.overflow for r in rows]
    assert zeros == sorted(zeros, reverse=True)
    assert rows[0].overflow == 0 < rows[-1].overflow


@pytest.mark.parametrize(
    ("scope", "phase", "layer"),
    [
        ("jvp(Net)/Net.helper/block/Dense_0", "forward", "block/Dense_0"),
        ("transpose(jvp(Net))/block/Dense_0", "backward", "block/Dense_0"),
        ("jvp()", "forward", "Net"),
        ("jvp(loss)", "forward", "loss"),
        ("transpose(jvp(Net))/jvp(Net)/rematted_computation/block", "forward", "block"),
        ("optimizer", "update", "optimizer"),
    ],
)
def test_a_name_stack_tells_pass_and_layer(scope, phase, layer):
    assert place_of(scope, "Net") == (layer, phase)


# --- during a training ------------------------------------------------------------------------------------------------


class NnxNet(nnx.Module):
    """Two layers, one of them in a list."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 4, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(4, 3, rngs=rngs)])

    def __call__(self, x):
        return self.rest[0](nnx.relu(self.first(x)))


@pytest.mark.slow
def test_reports_of_a_training_change_none_of_its_values():
    data = (np.concatenate([BATCH[0]] * 4), np.concatenate([BATCH[1]] * 4))
    options = {"optimizer": optax.sgd(0.1), "batch_size": 8, "progress": False, "epochs": 2}
    plain = tpuflow.train(NnxNet(nnx.Rngs(0)), data, "fp16", **options)
    watched = tpuflow.train(NnxNet(nnx.Rngs(0)), data, "fp16", numerics=3, **options)
    assert watched.losses == plain.losses
    pairs = zip(jax.tree.leaves(plain.params), jax.tree.leaves(watched.params), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    assert [report.settings["step"] for report in watched.numerics] == [0, 3, 6]
    assert watched.numerics[0].losses[0] == plain.losses[0]
    assert {row.layer for row in watched.numerics[0].rows} >= {"first", "rest/0"}
    assert len(watched.as_dict()["numerics"]) == 3


@pytest.mark.slow
def test_without_a_number_reports_come_before_every_epoch_and_after_the_last():
    result = tpuflow.train(nn.Dense(3), BATCH, batch_size=4, epochs=2, progress=False, numerics=True)
    assert [report.settings["step"] for report in result.numerics] == [0, 2, 4]
    assert timeline(result.numerics).splitlines()[-1].split()[0] == "4"


class Everything(nn.Module):
    """A convolution, batch normalisation, dropout, a checkpointed layer, and a choice between two branches."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(2, (3,), name="conv")(x[..., None])
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x.reshape(x.shape[0], -1))
        x = nn.remat(nn.Dense)(4, name="again")(jnp.tanh(x))
        x = jax.lax.cond(jnp.sum(x) < 1e6, lambda v: v * 1e-30, lambda v: v * 1e30, x)  # chosen
        return nn.Dense(3, name="last")(x)


@pytest.mark.slow
def test_branches_that_are_not_taken_are_not_counted_and_accumulated_steps_lose_no_update():
    options = {"optimizer": optax.sgd(0.1), "batch_size": 4, "progress": False, "accumulate_steps": 2}
    first, second, _ = tpuflow.train(Everything(), BATCH, "mixed_bf16", numerics=1, **options).numerics
    assert first.all_updates is None
    assert second.all_updates.elements == sum(u.elements for u in second.updates) > 0
    chosen = [o for o in first.operations if o.source.startswith(line_of("chosen")) and o.phase == "forward" and o.primitive == "mul"]
    assert sorted(o.elements for o in chosen) == [0, 16]
    assert {row.layer for row in first.rows} >= {"conv", "norm", "again", "last"}
    assert first.row("again", "activation").elements > 0


@pytest.mark.parametrize("numerics", [0, -1, "yes"])
def test_numerics_must_be_yes_no_or_a_number_of_steps(numerics):
    with pytest.raises(ConfigError, match="numerics"):
        tpuflow.train(nn.Dense(3), BATCH, progress=False, numerics=numerics)


# --- what is handed back ----------------------------------------------------------------------------------------------


def test_a_comparison_shows_the_precisions_side_by_side(healthy):
    assert healthy.policies == ("fp32", "fp16", "bf16", "mixed")
    lines = str(healthy).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(healthy.policies)
    assert any(line.startswith("first") and "activation gradient" in line for line in lines)
    with pytest.raises(KeyError, match="no report of 'fp8'"):
        healthy["fp8"]


def test_a_report_is_written_as_json(healthy, tmp_path):
    healthy["mixed"].to_json(tmp_path / "one.json")
    healthy.to_json(tmp_path / "all.json")
    one, every = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "all.json"))
    assert every["mixed"] == one
    assert one["first_nonfinite"]["layer"] == "loss"
    assert len(one["rows"]) == len(healthy["mixed"].rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"policy": ()}, "no policy"), ({"policy": "fp8"}, "unknown policy"), ({"steps": 0}, "steps"), ({"data": 5}, "one batch")],
)
def test_what_cannot_be_checked_is_refused(options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        tpuflow.check_numerics(Net(), **{"data": BATCH, **options})
