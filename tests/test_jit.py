"""tpuflow.jit behaves as jax.jit does, on the simulated device: arguments, results, transformations, caches, dispatch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import tpuflow
from tests.quick import FUSED
from tpuflow.device.limits import Limits
from tpuflow.errors import ConfigError, LaunchError, LimitError, UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.jaxprs.compat import is_alone
from tpuflow.jaxprs.versions import KEY_IMPLEMENTATIONS
from tpuflow.stages import staging

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 5)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(5, 3)) * 0.3, jnp.float32)


def layer(x, w):
    """A little network: [4, 5] x [5, 3] -> scalar."""
    return jnp.tanh(x @ w).sum()


def close(got, want, tolerance=1e-5):
    """Assert that two trees agree within a relative tolerance, and have equal types."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


@pytest.fixture
def compiles(monkeypatch):
    """The names of the Programs compiled during a test."""
    names = []
    real = staging.compile_jaxpr

    def counted(jaxpr, *, name, **options):
        names.append(name)
        return real(jaxpr, name=name, **options)

    monkeypatch.setattr(staging, "compile_jaxpr", counted)
    return names


# --- arguments and results --------------------------------------------------------------------------------------------


def test_trees_keyword_arguments_and_none_go_in_and_out():
    def fn(state, *, batch):
        return {"w": state["w"] * batch[0], "rest": (state["b"], None, [batch[1] + 1])}

    args = ({"w": X, "b": jnp.arange(3)},)
    batch = (2.0, np.float32(3))
    got = tpuflow.jit(fn)(*args, batch=batch)
    close(got, jax.jit(fn)(*args, batch=batch))
    assert isinstance(got["w"], jax.Array)


@pytest.mark.parametrize("value", [2, 2.5, True, np.int8(3), np.float64(1.5), np.arange(3), jnp.float16(1.5), jnp.bfloat16(2)])
def test_types_and_weakness_of_results_are_those_of_jax_jit(value):
    for fn in (lambda x: x, lambda x: x * 2, lambda x: x * 2.0, lambda x: jnp.sin(x)):
        got, want = tpuflow.jit(fn)(value), jax.jit(fn)(value)
        assert (got.dtype, got.weak_type, got.shape) == (want.dtype, want.weak_type, want.shape)
        close(got, want, 2e-2 if got.dtype.itemsize == 2 else 1e-5)


def test_random_keys_cross_as_keys():
    def fn(key):
        first, second = jax.random.split(key)
        return first, jax.random.uniform(second, (5,))

    key = jax.random.key(7)
    (got_key, got), (want_key, want) = tpuflow.jit(fn)(key), jax.jit(fn)(key)
    assert got_key.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(got_key), jax.random.key_data(want_key))
    np.testing.assert_array_equal(got, want)


def test_static_arguments_by_number_and_by_name(compiles):
    @tpuflow.jit(static_argnames=("power", "flip"))
    def fn(x, power, *, flip=False):
        return -(x**power) if flip else x**power

    close(fn(X, 2), X**2)
    close(fn(X, power=3, flip=True), -(X**3))
    close(fn(X, 2), X**2)
    assert compiles == ["fn", "fn"]
    by_number = tpuflow.jit(lambda n, x: jnp.zeros(n) + x, static_argnums=0)
    assert by_number(3, 1.0).shape == (3,)
    with pytest.raises(ValueError, match="static argument 0 must be hashable"):
        by_number([3], 1.0)


def test_limits_hold_for_calls_that_fit_exactly_too_and_every_call_is_a_round_trip():
    f, x = tpuflow.jit(lambda x: x * 2), jnp.ones((64,))
    executable = f.lower(x).compile().executable
    for _ in range(3):
        f(x)
    assert executable.round_trips == 3
    kept, executable.limits = executable.limits, Limits(memory_bytes=1)
    with pytest.raises(LimitError, match="the limit is 1:"):
        f(x)
    executable.limits = kept
    np.testing.assert_array_equal(f(x), 2 * np.ones(64))
    assert executable.round_trips == 4


def test_a_call_that_fits_exactly_is_still_part_of_what_is_around_it():
    seen = []

    def doubled(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x * x

    f, x = tpuflow.jit(doubled), jnp.arange(4.0)
    for _ in range(3):
        f(x)
    assert seen == [True] and is_alone()
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), 2 * np.arange(4.0))
    np.testing.assert_array_equal(jax.vmap(f)(x), np.arange(4.0) ** 2)
    assert "device_call" in str(jax.make_jaxpr(lambda: f(x))())
    with jax.disable_jit():
        np.testing.assert_array_equal(f(x), np.arange(4.0) ** 2)
    assert not seen[-1]
    with jax.set_mesh(jax.make_mesh((1,), ("i",))):
        before = len(seen)
        f(x)
        assert len(seen) == before + 1 and not is_alone()


def test_calls_that_fit_exactly_heed_what_jax_heeds_in_a_call():
    """They are launched without JAX's dispatch, which says what was deleted, and where a value is not a number."""
    f, x, y = tpuflow.jit(lambda x, y: x / y), jnp.ones(3), jnp.ones(3)
    for _ in range(3):
        f(x, y)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        f(0 * x, 0 * y)
    x.delete()
    with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=float32\[3\]"):
        f(x, y)
    np.testing.assert_array_equal(f(y, y), np.ones(3))


def test_calls_that_fit_exactly_run_where_their_arrays_are():
    code = """
import jax, jax.numpy as jnp, numpy as np, tpuflow
first, second = jax.devices()
f, g, x = tpuflow.jit(lambda x, n: (x + n, x)), jax.jit(lambda x, n: (x + n, x)), np.ones(3, np.float32)
for device in (first, second, None):
    for _ in range(3):
        given = jax.device_put((x, x), device)
        for ours, theirs in zip(f(*given), g(*given)):
            assert (ours.devices(), ours.committed) == (theirs.devices(), theirs.committed), device
with jax.default_device(second):
    assert f(jnp.asarray(x), jnp.asarray(x))[0].devices() == {second}
    assert f(*given)[0].devices() == g(*given)[0].devices()
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_types_that_differ_in_weakness_alone_are_told_apart_by_calls_that_fit_exactly():
    f, strong = tpuflow.jit(lambda x: x * jnp.ones((), jnp.bfloat16)), jnp.ones(())
    weak = jnp.asarray(1.0)
    assert weak.weak_type and not strong.weak_type
    for _ in range(3):
        assert (f(strong).dtype, f(weak).dtype) == (jnp.float32, jnp.bfloat16)
        assert f(np.ones((), np.float32)).dtype == jnp.float32


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_results_of_calls_that_fit_exactly_have_the_types_of_jax(engine):
    f = tpuflow.jit(lambda key, z: (key, z * 1j, jnp.full((), 2)), engine=engine)
    arguments = jax.random.split(jax.random.key(1))[0], jnp.ones((3,), jnp.complex64)
    for _ in range(3):
        found = f(*arguments)
        assert [(y.dtype, y.weak_type) for y in found[1:]] == [(jnp.complex64, False), (jnp.int32, True)]
        assert found[0] == arguments[0] and isinstance(found[1], jax.Array)


def test_donated_arguments_are_consumed_and_others_kept():
    step = tpuflow.jit(lambda state, x: ({"w": state["w"] + x}, x), donate_argnums=0)
    state, x = {"w": jnp.ones(1000)}, jnp.ones(1000)
    new, _ = step(state, x)
    assert state["w"].is_deleted() and not x.is_deleted()
    close(new["w"], jnp.full(1000, 2.0))
    by_name = tpuflow.jit(lambda x, y: x + y, donate_argnames="y").lower(X, X).compile()
    assert [p.donated for p in by_name.executable.program.inputs] == [False, True]


def test_shapes_decide_what_is_compiled(compiles):
    fn = tpuflow.jit(layer)
    for x in (X, X + 1, X[:2], X[:2] * 2, np.asarray(X)):
        fn(x, W)
    assert compiles == ["layer"] * 2
    fn.clear_cache()
    fn(X, W)
    assert len(compiles) == 3


def test_closed_over_arrays_become_constants():
    close(tpuflow.jit(lambda x: x @ W)(X), X @ W)


def test_methods_can_be_jitted():
    class Scale:
        factor = 3.0

        @tpuflow.jit(static_argnums=0)
        def __call__(self, x):
            return x * self.factor

    close(Scale()(X), X * 3)


def test_a_policy_casts_the_function():
    text = tpuflow.jit(layer, policy="mixed").lower(X, W).as_text()
    assert "f16[4,5]" in text


def test_a_whole_training_step_runs_on_the_device():
    optimizer = optax.adamw(1e-2)

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    ours, theirs = tpuflow.jit(step, donate_argnums=(0, 1)), jax.jit(step)
    a, b = (W + 0, optimizer.init(W)), (W + 0, optimizer.init(W))
    for _ in range(3):
        *a, loss_a = ours(*a, X, jnp.ones((4, 3)))
        *b, loss_b = theirs(*b, X, jnp.ones((4, 3)))
        close(loss_a, loss_b)
    close(a[0], b[0], 1e-4)


# --- transformations --------------------------------------------------------------------------------------------------

TRANSFORMED = {
    "grad": lambda f: jax.grad(f)(X, W),
    "value_and_grad": lambda f: jax.value_and_grad(f, (0, 1))(X, W),
    "jvp": lambda f: jax.jvp(f, (X, W), (W.sum() * X, 2 * W)),
    "linearize": lambda f: jax.linearize(lambda x: f(x, W), X)[1](X),
    "vjp": lambda f: jax.vjp(f, X, W)[1](2.0),
    "vmap": lambda f: jax.vmap(f, (0, None))(jnp.stack([X, 2 * X, -X]), W),
    "vmap_last": lambda f: jax.vmap(f, (-1, 2))(jnp.stack([X, 2 * X], -1), jnp.stack([W, -W], 2)),
    "vmap_grad": lambda f: jax.vmap(jax.grad(f), (0, None))(jnp.stack([X, 2 * X]), W),
    "grad_vmap": lambda f: jax.grad(lambda w: jax.vmap(f, (0, None))(jnp.stack([X, 2 * X]), w).sum())(W),
    "hessian": lambda f: jax.hessian(f, 1)(X, W),
    "jacrev": lambda f: jax.jacrev(f, (0, 1))(X, W),
    "grad_of_grad": lambda f: jax.grad(lambda x: (jax.grad(f)(x, W) ** 2).sum())(X),
    "plain_jit": lambda f: jax.jit(f)(X, W),
    "plain_jit_grad": lambda f: jax.jit(jax.grad(f))(X, W),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x, W), f(x * c, W)), 0.0, jnp.stack([X, 2 * X]))[1],
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X, W),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_calls_stay_on_the_device(name, compiles):
    close(TRANSFORMED[name](tpuflow.jit(layer)), TRANSFORMED[name](layer), 2e-5)
    assert compiles


def test_a_repeated_gradient_is_compiled_once(compiles):
    grad = jax.grad(tpuflow.jit(layer))
    grad(X, W)
    before = len(compiles)
    grad(2 * X, W)
    assert len(compiles) == before
    assert compiles == ["layer", "layer_backward"]  # the first with what the second needs of it


def test_integer_arguments_and_results_are_not_differentiated():
    def fn(x, n):
        return (x * n).sum(), jnp.argmax(x)

    (value, place), grad = jax.value_and_grad(tpuflow.jit(fn), has_aux=True)(X, 3)
    close(grad, jnp.full_like(X, 3.0))
    assert place == jnp.argmax(X) and np.isclose(value, 3 * X.sum(), rtol=1e-5)


def test_values_of_an_enclosing_transformation_may_be_captured():
    def outer(a):
        return tpuflow.jit(lambda b: a * b * b)(3.0)

    close(jax.grad(outer)(2.0), jax.grad(lambda a: a * 9.0)(2.0))
    close(jax.vmap(outer)(jnp.arange(3.0)), 9.0 * jnp.arange(3.0))


def test_a_device_function_inside_another_becomes_part_of_its_program(compiles):
    inner = tpuflow.jit(layer)
    outer = tpuflow.jit(lambda x, w: 2 * inner(x, w) + jax.grad(inner)(x, w).sum())
    close(outer(X, W), 2 * layer(X, W) + jax.grad(layer)(X, W).sum())
    assert len(compiles) == 1


def test_a_custom_rule_is_used():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    close(jax.grad(tpuflow.jit(lambda x: (clip(x) * 5).sum()))(X), jnp.full_like(X, 0.1))


# --- beside jax.jit ---------------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Tagged:
    """A node of the user's own, with a tag that belongs to the structure."""

    def __init__(self, value, tag):
        self.value, self.tag = value, tag

    def tree_flatten(self):
        return (self.value,), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(children[0], tag)


class Hashable:
    """Can be a static argument."""

    factor = 3

    def scale(self, x):
        return x * self.factor


BESIDE_JAX = {
    "static default": lambda jit: jit(lambda x, n=2: x * n, static_argnames="n")(X),
    "static name given by position": lambda jit: jit(lambda x, n=2: x * n, static_argnames="n")(X, 3),
    "static number given by name": lambda jit: jit(lambda x, n: x * n, static_argnums=1)(X, n=3),
    "static number from the end": lambda jit: jit(lambda x, n: x * n, static_argnums=-1)(X, 3),
    "partial options": lambda jit: functools.partial(jit, static_argnames=("n",))(lambda x, n: x * n)(X, n=2),
    "keyword-only": lambda jit: jit(lambda x, *, y: x + y)(X, y=2),
    "varied arguments": lambda jit: jit(lambda *a, **k: sum(a) + k["z"])(X, X, z=1.0),
    "a node of the user's own": lambda jit: jit(lambda p: Tagged(p.value + 1, p.tag))(Tagged(X, "tag")).value,
    "a method with a static self": lambda jit: jit(Hashable.scale, static_argnums=0)(Hashable(), X),
    "a bound method": lambda jit: jit(Hashable().scale)(X),
    "a weak float beside a half": lambda jit: jit(lambda a, b: a * b)(jnp.float16(2), 3.0),
    "a truth value": lambda jit: jit(lambda a: ~a)(True),
    "an old-style key": lambda jit: jit(lambda k: jax.random.bits(k, (3,)))(jax.random.PRNGKey(0)),
    "no arguments": lambda jit: jit(lambda: jnp.ones(3))(),
    "an empty array": lambda jit: jit(lambda a: a.sum())(jnp.zeros((0,))),
    "the argument itself": lambda jit: jit(lambda a: a)(X),
    "one result twice": lambda jit: jit(lambda a: (a, a, a + 1))(X),
    "a number as result": lambda jit: jit(lambda a: 3.0)(X),
    "64-bit arrays": lambda jit: jit(lambda a: a + 1)(np.arange(3.0)),
    "compiled with keywords": lambda jit: jit(lambda a, b: a - b).lower(X, b=2 * X).compile()(X, b=2 * X),
    "compiled with a static argument": lambda jit: jit(lambda a, n: a * n, static_argnums=1).lower(X, 3).compile()(X),
    "around jit in jit": lambda jit: jit(lambda a: jit(lambda b: b + 1)(a) * 2)(X),
    "inside jax.jit and scan": lambda jit: jax.jit(lambda a: jax.lax.scan(lambda c, x: (jit(jnp.add)(c, x), c), 0.0, a)[1])(X[0]),
    "eval_shape": lambda jit: jnp.ones(jax.eval_shape(jit(lambda a: a[:2] * 2), X).shape),
}


@pytest.mark.parametrize("name", BESIDE_JAX)
def test_a_call_does_what_jax_jit_does(name):
    ours, theirs = BESIDE_JAX[name](tpuflow.jit), BESIDE_JAX[name](jax.jit)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-6)


# --- stages -----------------------------------------------------------------------------------------------------------


def test_the_stages_have_the_words_of_jax(tmp_path):
    lowered = tpuflow.jit(layer).lower(jax.ShapeDtypeStruct((4, 5), jnp.float32), W)
    assert lowered.out_info == jax.ShapeDtypeStruct((), jnp.float32)
    assert lowered.args_info == ((jax.ShapeDtypeStruct((4, 5), jnp.float32), jax.ShapeDtypeStruct(W.shape, jnp.float32)), {})
    assert str(tpuflow.jit(layer).trace(X, W).lower().jaxpr) == str(lowered.jaxpr)
    assert "dot_general" in lowered.as_text()
    compiled = lowered.compile()
    close(compiled(X, W), layer(X, W))
    assert compiled.as_text().startswith("tpx 14.0") and "mm_accumulate" in compiled.as_text()
    costs = compiled.cost_analysis()
    assert costs["matrix flops"] == 2 * 4 * 5 * 3
    assert costs["bytes accessed"] >= X.nbytes + W.nbytes + 4
    memory = compiled.memory_analysis()
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == (X.nbytes + W.nbytes, 4)
    assert memory.peak_memory_in_bytes >= X.nbytes + W.nbytes + 4
    assert [p.name for p in compiled.executable.program.inputs] == ["x", "w"]
    with pytest.raises(TypeError, match="structure"):
        compiled(X)
    with pytest.raises(LaunchError, match=r"expected f32\[4,\s*5\]"):
        compiled(X[:2], W)


def test_a_saved_program_runs_without_its_function(tmp_path):
    compiled = tpuflow.jit(layer).lower(X, W).compile()
    compiled.save(tmp_path / "layer.tpx")
    (output,) = tpuflow.Executable.load(tmp_path / "layer.tpx").run({"x": X, "w": W}).values()
    np.testing.assert_array_equal(output, compiled(X, W))


def test_engines_agree():
    for fn in (layer, jax.grad(layer)):
        exact = tpuflow.jit(fn, fidelity="bitexact")(X, W)
        reference = tpuflow.jit(fn, engine="reference")(X, W)
        assert isinstance(reference, jax.Array)
        np.testing.assert_array_equal(exact, reference)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"backend": "gpu"}, "tpusim"),
        ({"chip": "tpu-v99"}, "unknown chip"),
        ({"static_argnums": 2}, "takes 2 positional"),
        ({"static_argnames": "z"}, r"\['z'\]"),
        ({"static_argnums": 0, "donate_argnums": 0}, "both static and donated"),
        ({"policy": "fp61"}, "Did you mean 'fp16'"),
    ],
)
def test_bad_options_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        tpuflow.jit(layer, **options)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="engine"):
        tpuflow.jit(layer, engine="gpu")(X, W)


def test_what_has_no_rule_is_named_with_the_users_line():
    with pytest.raises((UnsupportedPrimitiveError, UnsupportedDtypeError), match=r"test_jit\.py"):
        tpuflow.jit(lambda x: jnp.linalg.eigvals(x[:, :4]))(X)


def test_a_branch_on_a_traced_value_names_the_users_function():
    def branching(x):
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branching at .*test_jit\.py"):
        tpuflow.jit(branching)(1.0)


def test_an_argument_that_is_no_data_says_how_to_make_it_static():
    with pytest.raises(TypeError, match="'mean' of type str.*static_argnums"):
        tpuflow.jit(lambda x, how: x)(X, "mean")


@pytest.mark.parametrize("implementation", [name for name in KEY_IMPLEMENTATIONS if name not in ("philox2x32", "threefry4x32")])
def test_keys_of_any_of_jaxs_generators_go_in_and_come_out(implementation):
    def split(key):
        first, second = jax.random.split(key)
        return first, jax.random.uniform(second, (5,))

    key = jax.random.key(3, impl=implementation)
    found, expected = tpuflow.jit(split)(key), split(key)
    assert found[0].dtype == expected[0].dtype
    np.testing.assert_array_equal(jax.random.key_data(found[0]), jax.random.key_data(expected[0]))
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(jax.jit(tpuflow.jit(split))(key)[1], expected[1])


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_complex_arguments_and_results_cross_as_their_planes(engine):
    z = jnp.asarray((np.arange(6) + 1j * np.arange(6)[::-1]).reshape(2, 3), jnp.complex64)

    def turned(z, by):
        return {"spectrum": jnp.fft.fft(z) * by, "real": z.real + 1}

    jitted = tpuflow.jit(turned, engine=engine, donate_argnums=0)
    program = jitted.program(z, 2j)
    assert [port.name for port in program.inputs] == ["z.real", "z.imag", "by.real", "by.imag"]
    found, expected = jitted(jnp.copy(z), 2j), turned(z, 2j)
    assert found["spectrum"].dtype == jnp.complex64
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_tokens_are_arguments_results_and_constants(engine):
    kept = jax.lax.create_token()

    def step(x, token):
        return x + 1, jax.lax.after_all(token, jax.lax.create_token()), {"kept": kept, "given": token, "spectrum": x * 1j}

    jitted = tpuflow.jit(step, engine=engine)
    y, *tokens = jitted(X, kept)
    y, after, others = jitted(y, tokens[0])
    np.testing.assert_array_equal(y, X + 2)
    assert all(isinstance(token, type(kept)) for token in (after, others["kept"], others["given"]))
    assert jitted.lower(X, kept).out_info[1] is jax.typeof(kept)
    with jax.disable_jit():
        assert isinstance(jitted(X, kept)[1], type(kept))
    with pytest.raises(UnsupportedPrimitiveError, match=r"step: it takes or gives tokens.*Make tokens"):
        jax.jit(lambda x: jitted(x, jax.lax.create_token())[0])(X)


@pytest.mark.slow
def test_complex_arrays_are_ordered_and_summed_in_logarithms_exported_or_not():
    z = jnp.asarray(np.exp(1j * np.arange(12)).reshape(3, 4), jnp.complex64)

    def f(z):
        return jax.lax.cumlogsumexp(z * 9, 1), jax.lax.cumlogsumexp(z, 0, reverse=True), jax.lax.clamp(z[0, 0], z, z[1, 1])

    expected = jax.jit(f, compiler_options=FUSED)(z)
    for given in (f, jax.export.export(jax.jit(f))(z).call):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), tpuflow.jit(given)(z), expected)


def test_complex_functions_are_differentiated_and_batched():
    x = jnp.arange(8.0).reshape(2, 4)
    spectrum = tpuflow.jit(jnp.fft.rfft)
    for differentiable in (spectrum, jnp.fft.rfft):
        found = jax.vmap(jax.grad(lambda row, fft=differentiable: jnp.abs(fft(row) + 1j).sum()))(x)
        np.testing.assert_allclose(found, jax.vmap(jax.grad(lambda row: jnp.abs(jnp.fft.rfft(row) + 1j).sum()))(x), atol=1e-5)


def test_options_of_jax_jit_that_mean_nothing_here_are_taken_or_refused():
    jitted = tpuflow.jit(layer, keep_unused=True, inline=True, compiler_options={}, in_shardings=None, out_shardings=None)
    np.testing.assert_array_equal(jitted(X, W), tpuflow.jit(layer)(X, W))
    with pytest.raises(ConfigError, match=r"compiler_options: expected none, got .*xla_dump_to.*XLA's"):
        tpuflow.jit(layer, compiler_options={"xla_dump_to": "here"})
    with pytest.raises(ConfigError, match=r"compiler_options.*XLA's"):
        tpuflow.jit(layer).lower(X, W).compile(compiler_options={"xla_dump_to": "here"})
    with pytest.raises(ConfigError, match=r"in_shardings: expected jax.sharding.NamedShardings.*got 'x'"):
        tpuflow.jit(layer, in_shardings="x")


def test_what_is_lowered_has_the_texts_and_facts_that_jaxs_own_has():
    lowered = tpuflow.jit(layer).lower(X, W)
    assert "dot_general" in lowered.as_text() and "stablehlo.dot_general" in lowered.as_text("stablehlo")
    assert "test_jit.py" in lowered.as_text("stablehlo", debug_info=True)
    with pytest.raises(ConfigError, match="dialect"):
        lowered.as_text("mhlo")
    compiled = lowered.compile()
    assert lowered.fun_name == "layer" and lowered.args_info == compiled.args_info and lowered.out_info == compiled.out_info
    assert compiled.runtime_executable() is compiled.executable
    assert lowered.cost_analysis() == compiled.cost_analysis()


def test_why_a_function_is_traced_again_is_explained_if_asked_for(caplog):
    jitted = tpuflow.jit(lambda x, n=1: x["a"] * n, static_argnames="n")
    with jax.explain_cache_misses(True), caplog.at_level("WARNING", logger="tpuflow.jit"):
        jitted({"a": np.zeros(3, np.float32)})
        jitted({"a": np.zeros(4, np.float32)})
        jitted({"a": np.zeros(4, np.float32)}, n=2)
        jitted({"a": np.zeros(4, np.float32)})
        with jax.default_matmul_precision("highest"):
            jitted({"a": np.zeros(4, np.float32)})
    first, second, third, fourth = (r.getMessage() for r in caplog.records if r.name == "tpuflow.jit")
    assert "for the first time" in first
    assert "New is x/a: float32[4], was float32[3]." in second
    assert "the static arguments: " in third and "traced again (2 before)" in third
    assert "New is around the call, " in fourth and ("jax_default_matmul_precision" in fourth or "JAX's settings" in fourth)


def test_checkify_goes_into_a_call_of_the_device():
    def root(x):
        checkify.check(x.min() >= 0, "negative: {}", x.min())
        return jnp.sqrt(x)

    error, result = checkify.checkify(tpuflow.jit(root))(jnp.array([4.0, -1.0]))
    assert "negative: -1.0" in str(error.get()) and result[0] == 2
    error, _ = checkify.checkify(tpuflow.jit(root))(jnp.array([4.0, 1.0]))
    assert error.get() is None
    error, _ = tpuflow.jit(checkify.checkify(lambda x, i: x[i], errors=checkify.index_checks))(jnp.ones(3), 7)
    assert "index 7 is out of bounds" in str(error.get())
