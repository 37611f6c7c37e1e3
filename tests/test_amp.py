"""Policies, automatic casts and loss scaling, judged with plain jax.jit and by reading jaxprs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tpuflow
from tpuflow import amp
from tpuflow.errors import ConfigError, UnsupportedPrimitiveError
from tpuflow.jaxprs.compat import inner_jaxprs

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16


def _dense(x, w, b):
    return x @ w + b.reshape(1, -1)


def _operands(dtype=F32, n=5, k=33, m=7, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), F32).astype(dtype)  # noqa: E731
    return draw(n, k), draw(k, m), draw(m)


def _primitives(jaxpr, name):
    """Every equation of that primitive, nested jaxprs included."""
    found = [e for e in jaxpr.eqns if e.primitive.name == name]
    for eqn in jaxpr.eqns:
        for sub in inner_jaxprs(eqn):
            found += _primitives(sub, name)
    return found


def _types(fn, *args, primitive):
    return [tuple(str(v.aval.dtype) for v in (*e.invars, *e.outvars)) for e in _primitives(jax.make_jaxpr(fn)(*args).jaxpr, primitive)]


def test_unknown_policy_names_the_nearest_one():
    with pytest.raises(ConfigError, match="Did you mean 'mixed'"):
        amp.get_policy("mixd")


def test_a_users_own_policy_is_taken_as_it_is():
    own = amp.Policy("mine", compute_dtype="bfloat16", casts="list")
    assert amp.get_policy(own) is own
    assert _types(amp.autocast(jnp.dot, own), *_operands()[:2], primitive="dot_general")[0][0] == "bfloat16"


@pytest.mark.parametrize("bad", [{"casts": "some"}, {"loss_scale": "big"}, {"compute_dtype": "float8"}])
def test_a_malformed_policy_is_refused(bad):
    with pytest.raises(ConfigError):
        amp.Policy("mine", **bad)


@pytest.mark.parametrize("bad", [{"kind": "sometimes"}, {"kind": "static", "initial": 0.0}, {"kind": "dynamic", "growth_interval": 0}])
def test_a_malformed_loss_scale_is_refused(bad):
    with pytest.raises(ConfigError, match="loss scale"):
        amp.LossScale(**bad)


@pytest.mark.parametrize("name", ["fp32", "O0"])
def test_full_precision_leaves_the_function_alone(name):
    assert amp.autocast(_dense, name) is _dense


def test_casting_a_tree_leaves_integers_and_keys_alone():
    tree = {"w": jnp.ones(2), "n": jnp.arange(3), "key": jax.random.key(0), "name": "x"}
    cast = amp.get_policy("fp16").cast_params(tree)
    assert (cast["w"].dtype, cast["n"].dtype, cast["key"].dtype, cast["name"]) == (F16, jnp.int32, tree["key"].dtype, "x")


def test_mixed_puts_matrix_operands_in_fp16_and_exponentials_in_fp32():
    def fn(x, w):
        return jax.nn.softmax(jnp.tanh(x @ w))

    x, w, _ = _operands()
    assert _types(amp.autocast(fn, "mixed"), x, w, primitive="dot_general") == [("float16", "float16", "float16")]
    assert _types(amp.autocast(fn, "mixed"), x, w, primitive="tanh") == [("float16", "float16")]
    assert _types(amp.autocast(fn, "mixed"), x, w, primitive="exp") == [("float32", "float32")]


@pytest.mark.parametrize("policy", ["mixed", "fp16", "bf16", "mixed_bf16"])
def test_results_keep_the_types_of_the_function_itself(policy):
    x, w, b = _operands()
    out = amp.autocast(lambda x, w, b: {"y": _dense(x, w, b), "n": jnp.argmax(x)}, policy)(x, w, b)
    assert (out["y"].dtype, out["n"].dtype) == (F32, jnp.int32)


def test_a_bias_is_added_before_the_one_rounding():
    x, w, b = _operands(F16, n=64, k=256, m=32)
    once = (x.astype(F32) @ w.astype(F32) + b.astype(F32)).astype(F16)
    twice = (x.astype(F32) @ w.astype(F32)).astype(F16) + b
    got = jax.jit(amp.autocast(_dense, "fp16"))(x, w, b)
    assert (np.asarray(once) != np.asarray(twice)).any()
    np.testing.assert_array_equal(np.asarray(got), np.asarray(once))


@pytest.mark.parametrize("policy", ["fp16", "mixed"])
def test_backward_products_take_narrow_operands_and_bias_gradients_are_summed_in_fp32(policy):
    args = _operands(F16 if policy == "fp16" else F32)

    def loss(x, w, b):
        return jnp.sum(jnp.square(amp.autocast(_dense, policy)(x, w, b)))

    grad = jax.grad(loss, argnums=(0, 1, 2))
    for a, b, _ in _types(grad, *args, primitive="dot_general"):
        assert (a, b) == ("float16", "float16")
    sums = _types(grad, *args, primitive="reduce_sum")
    assert sums and all(types == ("float32", "float32") for types in sums)


def test_a_product_used_twice_is_rounded_at_once():
    def fn(x, w, b):
        y = x @ w
        return y + b, y

    assert _types(amp.autocast(fn, "fp16"), *_operands(F16), primitive="dot_general") == [("float16", "float16", "float16")]


def test_an_inactive_operand_costs_no_product_in_the_backward_pass():
    x, w, b = _operands(F16)
    grad = jax.grad(lambda w: jnp.sum(amp.autocast(_dense, "fp16")(x, w, b)))
    assert len(_types(grad, w, primitive="dot_general")) == 2


def test_python_numbers_do_not_widen():
    x, w, _ = _operands()
    assert _types(amp.autocast(lambda x, w: (x @ w) * 2.0, "mixed"), x, w, primitive="mul")[0][0] == "float16"
    assert _types(amp.autocast(lambda x, w: jnp.where(x @ w > 0, x @ w, 0.0), "mixed"), x, w, primitive="select_n")[0][1] == "float16"


def test_an_explicit_conversion_is_obeyed():
    x, w, _ = _operands()
    assert _types(amp.autocast(lambda x, w: jnp.sin((x @ w).astype(BF16)), "mixed"), x, w, primitive="sin") == [("bfloat16", "bfloat16")]


def test_long_sums_of_half_numbers_do_not_overflow_inside():
    x = jnp.full(4096, 32.0, F16)
    assert float(jax.jit(amp.autocast(lambda x: jax.lax.reduce_sum(x, (0,)) * F16(0.25), "fp16"))(x)) == np.inf
    assert float(jax.jit(amp.autocast(lambda x: jax.lax.reduce_sum(x - 31, (0,)), "fp16"))(x)) == 4096.0


@pytest.mark.parametrize("policy", ["fp16", "mixed", "bf16", "mixed_bf16"])
def test_control_flow_is_walked(policy):
    x, w, b = _operands(n=4, k=6, m=6)

    def fn(x, w, b):
        x, ys = jax.lax.scan(lambda c, _: (_dense(c, w, b), jnp.sum(c)), x, None, length=3)
        x = jax.lax.fori_loop(0, 2, lambda i, c: _dense(c, w, b) * 0.5, x)
        x = jax.lax.while_loop(lambda c: jnp.max(c) > 1e3, lambda c: _dense(c, w, b) * 0.01, x)
        return jax.lax.cond(jnp.min(x) > 0, lambda x: x @ w, lambda x: x - 1.0, x), ys

    out, ys = jax.jit(amp.autocast(fn, policy))(x, w, b)
    want, want_ys = fn(x, w, b)
    assert (out.dtype, ys.dtype) == (want.dtype, want_ys.dtype)
    np.testing.assert_allclose(out, want, rtol=0.1, atol=0.1 * float(jnp.abs(want).max()))
    dots = _types(amp.autocast(fn, policy), x, w, b, primitive="dot_general")
    assert len(dots) == 4 and {d[0] for d in dots} == {str(amp.get_policy(policy).compute)}


def test_a_batch_of_while_loops_computes_what_each_loop_alone_does():
    x, w, _ = _operands(n=4, k=6, m=6)

    def one(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 20, lambda c: jnp.tanh(c @ w) + c + 0.5, x)

    batch = jnp.stack([x, x + 1])
    np.testing.assert_array_equal(
        amp.autocast(jax.vmap(jax.vmap(one)), "mixed")(batch), jax.vmap(jax.vmap(amp.autocast(one, "mixed")))(batch)
    )


def test_remat_keeps_its_region():
    x, w, b = _operands()
    loss = amp.autocast(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(_dense(x, w, b)))(x)), "mixed")
    plain = amp.autocast(lambda x: jnp.sum(jnp.sin(_dense(x, w, b))), "mixed")
    assert len(_types(jax.grad(loss), x, primitive="sin")) == 1 and len(_types(jax.grad(plain), x, primitive="cos")) == 1
    (region,) = _primitives(jax.make_jaxpr(jax.grad(loss))(x).jaxpr, "remat2")
    assert _primitives(region.params["jaxpr"], "dot_general")[0].invars[0].aval.dtype == F16
    np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(plain)(x), atol=0.02)  # jit may drop roundings inside one computation


def test_a_custom_rule_is_kept_and_sees_the_types_it_was_traced_with():
    seen = []

    @jax.custom_vjp
    def clip_gradient(x):
        return x

    def backward(_, g):
        seen.append(str(g.dtype))
        return (jnp.clip(g, -0.5, 0.5),)

    clip_gradient.defvjp(lambda x: (x, None), backward)
    x, w, _ = _operands()
    grad = jax.grad(amp.autocast(lambda x: jnp.sum(clip_gradient(x @ w) @ w.T * 100.0), "mixed"))(x)
    assert set(seen) == {"float32"}
    np.testing.assert_allclose(grad, 0.5 * jnp.sign(jnp.sum(w, 0) * 0 + jnp.sum(w.T, 1)) @ w.T * jnp.ones_like(grad), rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_autocast_composes_with_vmap_jit_grad_and_forward_mode():
    x, w, b = _operands()
    fn = amp.autocast(lambda x: jnp.sum(jnp.tanh(_dense(x, w, b))), "mixed")
    batch = jnp.stack([x, 2 * x, -x])
    one_by_one = jnp.stack([jax.jit(jax.grad(fn))(e) for e in batch])
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(fn)))(batch), one_by_one, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(jax.grad(jax.jit(fn))(x), jax.grad(fn)(x), rtol=2e-3, atol=2e-3)
    value, tangent = jax.jvp(fn, (x,), (jnp.ones_like(x),))
    assert value.dtype == tangent.dtype == F32
    assert jax.hessian(fn)(x[:1]).shape == (1, 33, 1, 33)


def test_static_arguments_stay_python_values():
    fn = amp.autocast(lambda x, w, *, train: x @ w if train else x, "mixed")
    x, w, _ = _operands()
    assert fn(x, w, train=True).shape == (5, 7)
    assert fn(x, w, train=False).shape == (5, 33)


def test_convolutions_run_in_the_compute_type_with_their_bias():
    def fn(x, k, b):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b

    rng = np.random.default_rng(0)
    x, k, b = (jnp.asarray(rng.normal(size=s), F32) for s in ((2, 8, 8, 3), (3, 3, 3, 4), (1, 1, 1, 4)))
    assert _types(amp.autocast(fn, "mixed"), x, k, b, primitive="conv_general_dilated") == [("float16", "float16", "float32")]
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(amp.autocast(fn, "mixed")(*a))), (0, 1, 2)))(x, k, b)
    want = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2))(x, k, b)
    for got, expected in zip(grads, want, strict=True):
        assert got.dtype == F32
        np.testing.assert_allclose(got, expected, atol=0.03 * float(jnp.abs(expected).max()))


def _orthogonal(x):
    return jax.lax.linalg.qr(x, pivoting=True)[0]  # the line that is looked for


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "while": lambda f: lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 0, f, x),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda y: y, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "grad": lambda f: jax.grad(lambda x: f(x).astype(jnp.float32).sum()),
}


@pytest.mark.parametrize("policy", amp.POLICIES)
@pytest.mark.parametrize("around", AROUND)
def test_the_line_of_what_the_device_lacks_is_named_under_every_policy(policy, around):
    with pytest.raises(UnsupportedPrimitiveError, match=r"^\S*test_amp\.py:\d+ \(_orthogonal\)"):
        tpuflow.jit(amp.autocast(AROUND[around](_orthogonal), policy)).lower(np.eye(3, dtype=np.float32)).compile()


def test_the_source_line_and_module_path_survive_the_walk():
    import jax.extend.source_info_util as source_info

    def fn(x, w):
        with jax.named_scope("layer"):
            return x @ w

    x, w, _ = _operands()
    (dot,) = _primitives(jax.make_jaxpr(amp.autocast(fn, "mixed"))(x, w).jaxpr, "dot_general")
    assert "test_amp.py" in source_info.summarize(dot.source_info)
    assert str(dot.source_info.name_stack) == "layer"


def _scaled_run(optimizer, losses_scale, steps, growth=None):
    """Minimise sum(w * c) where c overflows fp16 whenever the scale is above `losses_scale`."""
    params = {"w": jnp.array([1.0, -0.0, 3.0])}
    state = optimizer.init(params)
    history = []
    for _ in range(steps):
        scale = amp.find_state(state).scale
        grads = {"w": jnp.where(scale > losses_scale, jnp.inf, jnp.array([0.5, 0.0, -1.0]) * scale)}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append((float(scale), int(amp.find_state(state).skipped)))
    return params, state, history


def test_dynamic_scale_backs_off_skips_and_grows():
    optimizer = amp.dynamic_loss_scale(optax.sgd(0.5), initial=2.0**16, growth_interval=3)
    params, state, history = _scaled_run(optimizer, 2.0**15, steps=6)
    assert [s for s, _ in history] == [65536, 32768, 32768, 32768, 65536, 32768]
    assert [k for _, k in history] == [1, 1, 1, 1, 2, 2]
    np.testing.assert_array_equal(params["w"], np.array([1.0 - 4 * 0.25, 0.0, 3.0 + 4 * 0.5], np.float32))
    assert int(state.good_steps) == 1


def test_with_hysteresis_the_first_overflows_since_it_grew_leave_the_scale() -> None:
    """As DeepSpeed's scaler counts them: they are skipped, the count does not start again before the scale has grown."""
    config = amp.LossScale("dynamic", initial=2.0**17, growth_interval=3, hysteresis=2)
    _, state, history = _scaled_run(amp.with_loss_scale(optax.sgd(0.5), config), 2.0**15, steps=9)
    assert [math.log2(s) for s, _ in history] == [17, 17, 16, 15, 15, 15, 16, 16, 15]
    assert [k for _, k in history] == [1, 2, 3, 3, 3, 3, 4, 5, 5]
    assert int(amp.find_state(state).overflows_left) == 1


def test_a_skipped_step_changes_no_bit_of_parameters_or_inner_state():
    optimizer = amp.dynamic_loss_scale(optax.adam(0.1))
    params = {"w": jnp.array([1.0, -0.0, 3.0])}
    state = optimizer.init(params)
    updates, after = optimizer.update({"w": jnp.array([1.0, jnp.nan, 0.0])}, state, params)
    same = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.asarray(same["w"]).view(np.uint32), np.asarray(params["w"]).view(np.uint32))
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    assert (float(after.scale), int(after.skipped), bool(after.last_finite)) == (32768.0, 1, False)


def test_static_scale_never_moves():
    _, state, history = _scaled_run(amp.static_loss_scale(optax.sgd(0.5), 1024.0), 2.0**15, steps=3)
    assert {s for s, _ in history} == {1024.0}
    assert int(state.skipped) == 0


def test_the_scale_stops_before_infinity():
    optimizer = amp.dynamic_loss_scale(optax.sgd(0.5), initial=2.0**127, growth_interval=1)
    state = optimizer.init({"w": jnp.ones(1)})
    _, state = optimizer.update({"w": jnp.zeros(1)}, state)
    assert float(state.scale) == 2.0**127


def test_the_scaled_loss_is_fp32_and_found_inside_a_chain():
    optimizer = optax.chain(amp.static_loss_scale(optax.clip(1.0), 8.0), optax.scale(-1.0))
    state = optimizer.init({"w": jnp.ones(2)})
    scaled = amp.scale_loss(jnp.float16(40000.0), state)
    assert (scaled.dtype, float(scaled)) == (F32, 320000.0)
    assert amp.scale_loss(jnp.float16(2.0), optax.sgd(1.0).init({})).dtype == F32


def test_the_first_mixed_step_overflows_as_the_documented_run_did():
    policy = amp.get_policy("mixed")
    x, w, b = _operands()
    optimizer = amp.with_loss_scale(optax.sgd(1e-3), policy.loss_scale)
    state = optimizer.init(w)

    def loss(w):
        return amp.scale_loss(jnp.mean(amp.autocast(_dense, policy)(x, w, b)).astype(policy.loss_dtype), state)

    grads = jax.jit(jax.grad(loss))(w)
    assert not bool(amp.all_finite(grads))
    assert float(optimizer.update(grads, state, w)[1].scale) == 32768.0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "fp16", "mixed"])
def test_plain_jax_jit_with_autocast_prints_the_documented_losses(policy, fashion_mnist, documented):
    """The first 201 steps of the documented run, with nothing of tpuflow but `amp`: the policies need no simulated device."""
    from models.mlp import MLP
    from train.mnist import initial_variables

    row = amp.get_policy(policy)
    optimizer = amp.with_loss_scale(optax.sgd(1e-3), row.loss_scale)
    apply = amp.autocast(MLP().apply, row)

    def step(carry, batch):
        params, state = carry

        def scaled(params):
            logits = apply(params, row.cast_inputs(batch[0])).astype(F32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean().astype(row.loss_dtype)
            return amp.scale_loss(loss, state), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    params = row.cast_params(jax.tree.map(jnp.asarray, initial_variables()))
    x, y = (jnp.asarray(a[: 201 * 64]).reshape(201, 64, *a.shape[1:]) for a in fashion_mnist.train)
    run = jax.jit(lambda c, batches: jax.lax.scan(step, c, batches), compiler_options={"xla_disable_hlo_passes": "algsimp"})
    losses = np.asarray(run((params, optimizer.init(params)), (x, y))[1], np.float64)[::100]
    np.testing.assert_allclose(losses, documented["runs"][policy]["epoch1_losses"][:3], rtol=0, atol=5e-6 if policy == "fp32" else 6e-7)


@pytest.mark.parametrize("operation", [lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.atan2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", ["fp16", "mixed", "bf16"])
def test_an_operation_takes_a_scalar_array_beside_a_larger_one_under_any_policy(operation, policy):
    x, s = jnp.ones((3, 4)), jnp.float32(2)  # lax takes an array of no dimensions beside one of any
    for arguments in ((x, s), (s, x)):
        narrow = amp.autocast(lambda a, b: operation(a @ a.T if a.ndim else a, b @ b.T if b.ndim else b), policy)(*arguments)
        wide = operation(*(a @ a.T if a.ndim else a for a in arguments))
        assert narrow.shape == (3, 3) and np.allclose(narrow, wide, rtol=1e-2)
