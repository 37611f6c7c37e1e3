"""Stock JAX programs for eight devices, run in a process of its own on the CPU's devices or on simulated ones; they know neither.

Run with a file's name as the argument: there go the arrays, whole, with the devices that have them and where each one's piece begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def mesh(shape: tuple[int, ...] = (2, 4), axes: tuple[str, ...] = ("a", "b"), kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def cut(*spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), P(*spec))


def square() -> np.ndarray:
    return np.arange(64, dtype=np.float32).reshape(8, 8) % 11


@case
def said_of_arguments_and_results() -> Any:
    return jax.jit(lambda x: x * 2, in_shardings=cut("a", "b"), out_shardings=cut("b"))(square())


@case
def said_of_an_argument_alone() -> Any:
    x = jax.device_put(square(), cut("a", "b"))
    return jax.jit(lambda x: ((x @ x.T).sum(0), x.T, x[:, :2], x.sum(), x.reshape(4, 16)))(x)


@case
def without_arguments() -> Any:
    return jax.jit(lambda: (jnp.arange(16.0), jnp.ones(3)), out_shardings=(cut(("b", "a")), cut()))()


@case
def constraints() -> Any:
    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(x @ x, cut(None, "a"))
        return lax.scan(lambda c, row: (c + row, c * row), y[0], y)

    return jax.jit(f)(jax.device_put(square(), cut("a")))


@case
def one_operation_at_a_time() -> Any:
    x = jax.device_put(square(), cut("b", "a"))
    return x + 1, x.T, x[2], x > 3, x.astype(jnp.bfloat16), x.astype(jnp.int32) // 3


@case
def explicit_axes() -> Any:
    with jax.set_mesh(mesh((8,), ("d",), AxisType.Explicit)):
        x = jax.device_put(np.arange(16.0, dtype=np.float32), P("d"))
        return jax.jit(lambda x: (x * 2, jnp.stack([x, x])))(x), x + jnp.ones(16)


@case
def other_orders_of_devices() -> Any:
    around = NamedSharding(Mesh(np.array(jax.devices())[::-1], ("d",)), P("d"))
    some = NamedSharding(Mesh(np.array(jax.devices())[[5, 1, 2, 6]].reshape(2, 2), ("d", "e")), P("e", None))
    return jax.jit(jnp.cumsum)(jax.device_put(np.arange(16), around)), jax.jit(lambda x: (x @ x, x.sum(0)))(jax.device_put(square(), some))


@case
def from_one_order_of_devices_to_another() -> Any:
    """Between a mesh and another that numbers the devices backwards."""
    backwards = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))
    x, z = jax.device_put(square(), cut("a", "b")), jax.device_put(square() * 1j, cut("b"))
    there = [jax.device_put(y, NamedSharding(backwards, P(*spec))) for y, spec in ((x, "a"), (x, "ba"), (z, ()))]
    return there, [jax.device_put(y, cut("b", "a")) for y in there]


@case
def mapped_by_hand() -> Any:
    def f(x: Any) -> Any:
        number = lax.axis_index("b")
        around = lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)])
        return (
            lax.psum(x, ("a", "b")),
            lax.all_gather(x, "b", axis=1, tiled=True),
            lax.psum_scatter(x, "a", scatter_dimension=0, tiled=True),
            lax.all_to_all(x, "a", 0, 1, tiled=True),
            lax.pmax(x, "a") * number,
            around,
        )

    specs = (P(), P("a"), P(("a", "b")), P(None, ("b", "a")), P(None, "b"), P("a", "b"))
    mapped = jax.shard_map(f, mesh=mesh(), in_specs=P("a", "b"), out_specs=specs, check_vma=False)
    return jax.jit(mapped)(square()), mapped(square())


@case
def pmap() -> Any:
    def f(x: Any, y: Any) -> Any:
        return lax.pmean(x, "i") * y, lax.axis_index("i"), lax.all_gather(x, "i")

    some = jax.pmap(lambda x: lax.ppermute(x, "i", [(0, 2), (2, 1)]), axis_name="i", devices=jax.devices()[2:5])
    return jax.pmap(f, axis_name="i", in_axes=(0, None))(square(), 3.0), some(np.arange(3.0))


@case
def random_keys() -> Any:
    keys = jax.jit(lambda key: jax.random.split(key, 8), out_shardings=cut(("a", "b")))(jax.random.key(0))
    return jax.random.key_data(keys), jax.jit(jax.vmap(lambda key: jax.random.bits(key, (4,))))(keys)


@case
def random_numbers_of_a_mapped_axis_beside_one_that_is_not() -> Any:
    """By hand over one axis, by the partitioner over the other: its parts of numbers of 64 bits are reshaped."""
    explicit = mesh((2, 4), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(explicit):
        keys = jax.reshard(jax.random.split(jax.random.key(0), 2), NamedSharding(explicit, P("a")))

        def f(key: Any) -> Any:
            bits = jax.random.bits(key.squeeze(0), (1, 8), out_sharding=P(None, "b"))
            return bits, jax.reshard(jax.random.bits(key.squeeze(0), (1, 4)), P(None, "b"))

        return jax.jit(jax.shard_map(f, out_specs=P("a"), axis_names={"a"}))(keys)


@case
def complex_arrays() -> Any:
    z = jax.device_put((square() + 1j * square().T).astype(np.complex64), cut("a", "b"))
    return jax.jit(lambda z: (z.T * 2, z.sum(1), z.real))(z), jax.jit(lambda z: z.conj(), out_shardings=cut())(z)


@case
def several_meshes() -> Any:
    """A mesh of 2 x 4 beside one of 8 and one of 4 x 2, whose axes are parts of those of the first, or more than they are."""
    row, other = (NamedSharding(mesh(shape, axes), P(*axes)) for shape, axes in (((8,), ("c",)), ((4, 2), ("d", "e"))))

    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(x + 1, row)
        return lax.with_sharding_constraint((y * 2).T, other), lax.with_sharding_constraint(x.sum(1), NamedSharding(other.mesh, P("d")))

    return jax.jit(f, in_shardings=cut("a", "b"), out_shardings=(other, NamedSharding(other.mesh, P("d"))))(square())


@case
def parts_of_an_axis() -> Any:
    """Eight devices in a row; reshaped, what lies along them is over parts of the row."""
    row = mesh((8,), ("c",))
    x = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(row, P("c")))

    def f(x: Any) -> Any:
        return x.reshape(4, 4) * 2, x.reshape(4, 4).sum(0), x.reshape(4, 4).sum(1), x.reshape(2, 4, 2).max(1)

    return jax.jit(f, out_shardings=NamedSharding(row, P()))(x)


@case
def nothing_to_give_back() -> Any:
    x = jax.device_put(square(), cut("a"))
    assert jax.jit(lambda x: ())(x) == ()
    return x


@case
def sums_that_are_not_made_yet() -> Any:
    """Each device's summand, what it is scaled and summed to, and a gradient through it."""
    explicit = mesh((2, 4), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(explicit):
        x, w = jax.device_put(square(), P("a", "b")), jax.device_put(square().T, P("b"))
        summands = jax.jit(lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a", unreduced={"b"})))(x, w)
        whole = jax.jit(lambda y: jax.reshard(y + y, P("a")))(summands)
        gradient = jax.jit(
            jax.grad(lambda w: jax.reshard(jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a", unreduced={"b"})), P("a")).sum())
        )(w)
    shards = sorted(summands.addressable_shards, key=lambda s: s.device.id)
    return [np.asarray(s.data) for s in shards], whole, gradient


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8)(nn.LayerNorm()(nn.relu(nn.Dense(16)(x))))


@case
def training() -> Any:
    """Batches cut over one axis, kernels over the other; nothing is said of results."""
    model, optimizer, batch = Net(), optax.adam(1e-2, eps=1e-3), cut("a")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 12)).astype(np.float32)
    y = x[:, :8].argmax(1)
    params = model.init(jax.random.key(0), x)
    params = jax.device_put(params, jax.tree.map(lambda p: cut(None, "b") if p.ndim == 2 else cut(), params))
    moments = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, moments: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    losses = []
    for _ in range(5):
        params, moments, value = step(params, moments, jax.device_put(x, batch), jax.device_put(y, batch))
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    return np.array(losses, np.float32), params


def described(x: Any) -> dict[str, np.ndarray]:
    """An array's elements (bf16 as f32), and for each device that has a piece its number and where the piece begins and ends."""
    shards = sorted(x.addressable_shards, key=lambda s: s.device.id) if isinstance(x, jax.Array) else []
    ranges = [[s.device.id, *(n for i, length in zip(s.index, x.shape, strict=True) for n in i.indices(length)[:2])] for s in shards]
    whole = np.asarray(x)
    assert all(np.array_equal(np.asarray(s.data), whole[s.index]) for s in shards)
    return {"elements": whole.astype(np.float32) if x.dtype == jnp.bfloat16 else whole, "pieces": np.array(ranges)}


if __name__ == "__main__":
    found = {}
    for name, function in CASES.items():
        for i, leaf in enumerate(jax.tree.leaves(function())):
            found |= {f"{name} {i} {what}": array for what, array in described(leaf).items()}
    np.savez(sys.argv[1], **found)
