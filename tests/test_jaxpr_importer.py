"""The importer of jaxprs: their graphs mean what jax.jit computes, say where the user wrote them, and refuse what has no rule."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive

from tests.cases import CASES, ROWS, assert_close, words
from tests.coverage import primitives_of_jax
from tests.quick import FUSED, QUICK
from tpuflow.errors import UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.jaxprs.expansions import EXPANSIONS
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.advice import FAMILIES
from tpuflow.lower.importers.jaxpr import RULES, lower_jaxpr
from tpuflow.lower.importers.jaxpr.registry import Rule


def graph_of(fn: Any, *args: Any) -> Graph:
    return verify(lower_jaxpr(jax.make_jaxpr(fn)(*args), "f"))


def run(fn: Any, *args: Any) -> tuple[np.ndarray, ...]:
    return interpret(graph_of(fn, *args), *map(words, jax.tree.leaves(args)))


def test_the_table_has_a_hundred_rows_over_seventy_primitives_and_every_name_once() -> None:
    used: set[str] = set()
    for case in CASES:
        used |= _primitives(jax.make_jaxpr(case.fn)(*case.arguments()).jaxpr)
    assert len(CASES) >= 100 and len(used) >= 70, len(used)
    names = [case.name for case in ROWS]
    assert len(set(names)) == len(names)


def _primitives(jaxpr: Any) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                found |= _primitives(inner.jaxpr if hasattr(inner, "jaxpr") else inner)
    return found


# --- whole training steps -----------------------------------------------------------------------------------------------


class _MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (12, 10):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(5)(x)


class _CNN(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool = True) -> Any:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(6, (3, 3), strides=(2, 2), padding="VALID")(x)), (2, 2), (1, 1), "SAME")
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(5)(x)


_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 20)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "adamax": optax.adamax(1e-2),
    "nadam": optax.nadam(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "radam": optax.radam(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "adagrad": optax.adagrad(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-3),
    "yogi": optax.yogi(1e-2),
    "novograd": optax.novograd(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "sm3": optax.sm3(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(_SCHEDULE)),
    "accumulating": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "skipping": optax.apply_if_finite(optax.sgd(0.1), 3),
    "averaging": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}


def _mlp_step(optimizer: optax.GradientTransformation) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(_MLP().apply(params, x), y).mean()  # pyright: ignore

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _check_step(step: Any, *args: Any) -> None:
    expected = jax.jit(step).lower(*args).compile(compiler_options=QUICK)(*args)
    for got, want in zip(run(step, *args), jax.tree.leaves(expected), strict=True):
        assert_close(got, words(want), "composed", "training step")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_with_every_common_optimizer_is_what_jax_computes(name: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((9, 7), np.float32), rng.integers(0, 5, 9).astype(np.int32)
    params = _MLP().init(jax.random.key(0), x)
    _check_step(_mlp_step(OPTIMIZERS[name]), params, OPTIMIZERS[name].init(params), x, y)  # pyright: ignore


@pytest.mark.slow
def test_a_training_step_of_a_small_convolution_network_is_what_jax_computes() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 12, 10, 2), np.float32), rng.integers(0, 5, 4).astype(np.int32)
    variables = _CNN().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def step(params: Any, stats: Any, words: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            rngs = {"dropout": jax.random.wrap_key_data(words)}
            logits, new = _CNN().apply({"params": params, **stats}, x, rngs=rngs, mutable=["batch_stats"])  # pyright: ignore
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats, value

    stats = {"batch_stats": variables["batch_stats"]}
    _check_step(step, variables["params"], stats, jax.random.key_data(jax.random.key(3)), x, y)


def test_a_scanned_recurrent_layer_trains_as_in_jax() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 6, 4), np.float32)
    layer = nn.RNN(nn.GRUCell(5))
    params = layer.init(jax.random.key(0), x)
    _check_step(jax.value_and_grad(lambda p, x: jnp.mean(jnp.square(layer.apply(p, x)))), params, x)


def test_random_keys_cross_the_boundary_as_words() -> None:
    def split(key: Any) -> Any:
        return jax.random.split(key), jax.random.uniform(key, (3,))

    key = jax.random.key(7)
    keys, drawn = interpret(graph_of(split, key), np.asarray(jax.random.key_data(key)))
    expected_keys, expected = split(key)
    np.testing.assert_array_equal(keys, jax.random.key_data(expected_keys))
    np.testing.assert_array_equal(drawn, expected)


# --- where the user wrote it --------------------------------------------------------------------------------------------


def test_every_node_of_a_model_names_the_users_line_and_the_modules_scope() -> None:
    x = np.ones((2, 7), np.float32)
    params = _MLP().init(jax.random.key(0), x)
    nodes = list(graph_of(_MLP().apply, params, x).walk())
    assert all(node.source.startswith("test_jaxpr_importer.py:") for node in nodes)
    assert any(node.source.endswith("(_MLP.__call__)") and "Dense_0" in node.scope for node in nodes if node.op == "dot")


def test_the_same_program_has_the_same_text_twice() -> None:
    x, y = np.ones((9, 7), np.float32), np.ones(9, np.int32)
    params = _MLP().init(jax.random.key(0), x)
    state = OPTIMIZERS["adam"].init(params)  # pyright: ignore
    texts = {str(graph_of(_mlp_step(OPTIMIZERS["adam"]), params, state, x, y)) for _ in range(2)}
    assert len(texts) == 1


def test_a_primitive_of_a_library_is_what_its_author_defines_in_functions_of_jax() -> None:
    scaled, read = Primitive("scaled"), Primitive("read")
    scaled.def_impl(lambda x, *, by: jnp.tanh(x) * by)
    read.def_impl(lambda x: np.float32(float(x)))
    for primitive in (scaled, read):
        primitive.def_abstract_eval(lambda x, **_: x)
    (found,) = interpret(graph_of(lambda x: scaled.bind(x, by=2.0), np.float32(1)), np.float32(1))
    np.testing.assert_allclose(found, np.tanh(np.float32(1)) * 2, rtol=1e-6)
    with pytest.raises(UnsupportedPrimitiveError, match="no lowering rule for jaxpr primitive 'read'"):
        graph_of(read.bind, np.float32(1))


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_a_primitive_without_a_rule_names_itself_its_types_the_line_and_what_to_do_instead() -> None:
    with pytest.raises(UnsupportedPrimitiveError) as error:
        graph_of(lambda x: lax.linalg.schur(x), np.eye(3, dtype=np.float32))
    message = str(error.value)
    assert "no lowering rule for jaxpr primitive 'schur' on (float32[3,3]). It is a matrix decomposition" in message
    assert "test_jaxpr_importer.py:" in message and "Instead, use jnp.linalg.svd, eigh" in message


def test_advice_is_given_for_primitives_of_jax_that_have_no_rule() -> None:
    """A row for a name that JAX does not have, or that has a rule by now, is dead."""
    advised = [primitive for family in FAMILIES for primitive in family.primitives]
    assert len(advised) == len(set(advised))
    assert not set(advised) & {*RULES, *EXPANSIONS}
    assert not set(advised) - primitives_of_jax()


def test_a_form_of_a_primitive_that_is_not_covered_says_why_and_where() -> None:
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_jaxpr_importer\.py.*'gather'.*one_hot") as error:
        graph_of(lambda x, i: x.at[i].get(mode="one_hot"), np.ones((5, 3), np.float32), np.array([1, 1]))
    assert "use 'clip' or 'fill'" in str(error.value)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex64"])
def test_element_types_that_the_device_lacks_are_refused_by_name(dtype: str) -> None:
    with jax.enable_x64(True), pytest.raises(UnsupportedDtypeError, match=f"argument 0.*{dtype}"):
        graph_of(lambda x: x + 1, np.ones(3, dtype))


def test_an_element_type_that_arises_inside_names_the_users_line() -> None:
    with pytest.raises(UnsupportedDtypeError, match=r"test_jaxpr_importer\.py:\d+ .*float64"), jax.enable_x64(True):
        graph_of(lambda x: jnp.abs(x.astype("float64")), np.ones(3, np.float32))


def test_equations_nobody_needs_are_dropped_before_they_can_be_refused() -> None:
    def unused(x: Any) -> Any:
        lax.linalg.schur(x)
        return x * 2

    assert [node.op for node in graph_of(unused, np.eye(3, dtype=np.float32)).nodes] == ["full", "mul"]


def test_a_scan_does_not_stack_outputs_that_nobody_reads() -> None:
    def last(x: Any) -> Any:
        return lax.scan(lambda c, y: (c + y, c * y), jnp.float32(0), x)[0]

    assert not any(node.op == "dynamic_update_slice" for node in graph_of(last, np.ones(5, np.float32)).walk())


# --- forms the rest of the compiler relies on ---------------------------------------------------------------------------


def test_no_operation_but_full_sees_or_makes_an_empty_array() -> None:
    for case in CASES:
        if "empty" not in case.name and "nothing" not in case.name:
            continue
        for node in graph_of(case.fn, *case.arguments()).walk():
            empty = any(not v.type.elems for v in (*node.inputs, *node.results))
            assert node.op == "full" or node.regions or not empty, f"{case.name}: {node.op}"


def test_a_bias_is_broadcast_straight_from_its_vector() -> None:
    x = np.ones((2, 7), np.float32)
    params = _MLP().init(jax.random.key(0), x)
    for node in graph_of(_MLP().apply, params, x).nodes:
        assert node.op != "broadcast" or len(node.inputs[0].shape) <= 1


@pytest.mark.parametrize(("stride", "moves"), [(1, ["reverse"]), (2, ["pad", "pad", "reshape", "reshape", "reverse", "reverse", "slice"])])
def test_a_convolution_is_one_node_and_each_of_its_gradients_too(stride: int, moves: list[str]) -> None:
    """Beside the products there are moves only: of the weights, which are small, and for a stride of what the gradient is spread over."""
    x, w = np.ones((2, 9, 9, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert [n.op for n in graph_of(conv, x, w).nodes] == ["conv"]
    both = graph_of(jax.grad(lambda x, w: jnp.sum(conv(x, w)), (0, 1)), x, w)
    assert sorted(n.op for n in both.nodes if n.op not in ("full", "broadcast")) == ["conv", "conv", *moves]


def test_a_gradient_that_is_spread_over_the_image_is_spread_in_its_own_type() -> None:
    x, w = np.ones((2, 8, 8, 4), np.float16), np.ones((1, 1, 4, 4), np.float16)

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    graph = graph_of(jax.grad(loss), x, w)
    assert {str(n.result.dtype) for n in graph.nodes if n.op == "pad"} == {"f16"}


def test_negative_padding_of_a_convolution_cuts_the_image() -> None:
    """Judged against an explicit cut: XLA:CPU's own convolution reads beyond its operand here."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 9, 9, 2), np.float32), rng.standard_normal((3, 3, 2, 3), np.float32)

    def convolved(x: Any, w: Any, padding: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def cut(x: Any) -> Any:
        return lax.pad(x, np.float32(0), ((0, 0, 0), (-1, 1, 0), (0, -2, 0), (0, 0, 0)))

    (got,) = run(lambda x, w: convolved(x, w, ((-1, 1), (0, -2))), x, w)
    assert_close(got, np.asarray(convolved(cut(x), w, "VALID")), "sum", "negative padding")


def test_every_rule_names_a_primitive_that_jax_has_and_none_is_also_expanded() -> None:
    assert not set(RULES) & set(EXPANSIONS)
    assert set(RULES) <= {*primitives_of_jax(), "device_call"}


def test_captured_arrays_have_the_type_jax_gives_them() -> None:
    (result,) = run(lambda x: x * np.arange(3.0) + np.arange(3), np.ones(3, np.float32))
    np.testing.assert_array_equal(result, np.array([0, 2, 4], np.float32))


def test_captured_random_keys_are_constants_of_words() -> None:
    key = jax.random.key(3)
    (drawn,) = run(lambda x: x + jax.random.uniform(key, (3,)), np.ones(3, np.float32))
    np.testing.assert_array_equal(drawn, jax.random.uniform(key, (3,)) + 1)


# --- truth values, and errors that are ours -----------------------------------------------------------------------------

_ON_TRUTH_VALUES = {
    "less": jnp.less,
    "less or equal": jnp.less_equal,
    "greater": jnp.greater,
    "greater or equal": jnp.greater_equal,
    "equal": jnp.equal,
    "not equal": jnp.not_equal,
    "in total order": lax.lt_to_p.bind,
    "in total order or equal": lax.le_to_p.bind,
    "equal in total order": lax.eq_to_p.bind,
    "largest": jnp.maximum,
    "smallest": jnp.minimum,
    "clamped": lambda x, y: lax.clamp(x, y, y | x),
    "searched": lambda x, y: jnp.searchsorted(jnp.sort(x), y, side="right"),
    "sorted": lambda x, y: lax.sort((x, y), num_keys=2),
    "median": lambda x, y: jnp.median(x),
    "a member": jnp.isin,
}


@pytest.mark.parametrize("name", _ON_TRUTH_VALUES)
def test_truth_values_are_compared_as_jax_does(name: str) -> None:
    x, y = np.array([True, False, True, False, True]), np.array([False, False, True, True, False])
    fn = _ON_TRUTH_VALUES[name]
    for want, got in zip(jax.tree.leaves(jax.jit(fn, compiler_options=FUSED)(x, y)), run(fn, x, y), strict=True):
        np.testing.assert_array_equal(got, np.asarray(want))


def test_an_error_in_a_rule_says_at_which_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*operands: Any) -> Any:
        raise KeyError("what nobody thought of")

    monkeypatch.setitem(RULES, "tanh", Rule(broken, ()))
    with pytest.raises(KeyError) as caught:
        graph_of(lambda x: jax.jit(jnp.tanh)(x + 1), np.zeros(3, np.float32))
    assert any("'tanh'" in note and "test_jaxpr_importer.py" in note for note in caught.value.__notes__)
