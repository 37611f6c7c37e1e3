"""Run in a process of its own, with JAX_PLATFORMS=tpusim: the cases, whose arrays go to the file argv[1], and facts, printed as JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, serialize_executable

from tests.pjrt_cases import CASES, computed
from tests.pjrt_facts import FACTS, fact, raised


def in_use() -> int:
    return jax.devices()[1].memory_stats()["bytes_in_use"]


@fact
def devices() -> Any:
    return [str(d) for d in jax.devices("tpusim")], jax.default_backend(), jax.devices()[0].device_kind, raised(lambda: jax.devices("cpu"))


@fact
def strides() -> Any:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = (x, x.T, x[::-1, ::2], x[1:3, ::-3], x[:, :0], x[2, 3], np.asfortranarray(x))
    return [bool(np.array_equal(np.asarray(jax.device_put(v)), v)) for v in views]


@fact
def host_memory_is_copied() -> Any:
    x = np.zeros(4, np.float32)
    on_device = jax.device_put(x)
    x[:] = 1
    back = np.array(on_device)
    back[:] = 2
    return float(on_device.sum())


@fact
def donation() -> Any:
    x, kept = jnp.ones(8), jnp.ones(8)
    f = jax.jit(lambda x, y: (x + y, y), donate_argnums=0)
    total, same = f(x, kept)
    return x.is_deleted(), kept.is_deleted(), float(total.sum()), float(same.sum()), raised(lambda: x + 1)


@fact
def the_same_array_twice() -> Any:
    x = jnp.ones(8)
    return [float(y.sum()) for y in jax.jit(lambda x, y: (x + y, x * 3))(x, x)]


@fact
def memory_is_given_back() -> Any:
    there = jax.devices()[1]
    before = in_use()
    x = jax.device_put(np.ones(1000, np.float32), there)
    y = jax.jit(lambda x: x + 1)(x)
    between = in_use()
    x.delete()
    del y
    after = in_use()
    for _ in range(100):
        jax.device_put(np.ones(1000, np.float32), there)
    stats = there.memory_stats()
    return before, between, after, in_use(), stats["bytes_limit"], stats["peak_bytes_in_use"]


@fact
def devices_side_by_side() -> Any:
    f = jax.jit(lambda x: x * 2)
    placed = [jax.device_put(np.full(4, i, np.float32), d) for i, d in enumerate(jax.devices())]
    results = [f(x) for x in placed]
    moved = jax.device_put(results[1], jax.devices()[0])
    return [r.device.id for r in results], [float(r.sum()) for r in results], moved.device.id, float(moved.sum())


@fact
def errors() -> Any:
    return {
        "no such type": raised(lambda: jnp.ones(2, jnp.float8_e8m0fnu) * 2),
        "no rule": raised(lambda: jax.jit(jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((3,), np.float32)))(jnp.ones(3))),
        "too large to compile": raised(lambda: jnp.ones((2**18, 2**18))),
        "no such option": raised(lambda: jax.jit(jnp.sin, compiler_options={"xla_embed_irr": True})(1.0)),
        "an option": float(jax.jit(lambda x: x + 1, compiler_options={"xla_embed_ir_in_executable": True})(1.0)),
        "alive": float(jnp.ones(3).sum()),
    }


@fact
def factorisations() -> Any:
    """How far what is put together again is from what was taken apart, with the lowerings that JAX has for TPUs."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((6, 6)), jnp.float32)
    definite = a @ a.T + jnp.eye(6)
    root, (values, vectors), (u, sizes, v) = jnp.linalg.cholesky(definite), jnp.linalg.eigh(definite), jnp.linalg.svd(a)
    together = {
        "cholesky": root @ root.T - definite,
        "lu": definite @ jnp.linalg.solve(definite, a) - a,
        "eigh": (vectors * values) @ vectors.T - definite,
        "svd": (u * sizes) @ v - a,
        "fft": jax.jit(lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real)(a) - a,
    }
    return {name: float(jnp.abs(difference).max()) for name, difference in together.items()}


@fact
def exceptions_survive_what_dies_with_them() -> Any:
    def fails(i: int) -> None:
        array = jnp.ones(5) + i
        raise KeyError(int(array[0]))

    return [raised(lambda i=i: fails(i)) for i in range(20)] == [f"KeyError: {i + 1}" for i in range(20)]


@fact
def analyses() -> Any:
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
    memory = compiled.memory_analysis()
    costs = compiled.cost_analysis()
    return {
        "flops": costs["flops"],
        "ordered": costs["optimal_seconds"] <= costs["device_seconds"] <= costs["modelled_seconds"],
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "code": memory.generated_code_size_in_bytes > 0,
    }


@fact
def arrays_at_the_host() -> Any:
    """What is put there within a program."""
    function = jax.jit(lambda x: jnp.sort(jax.device_put(jax.device_put(x * 2, jax.memory.Space.Host), jax.memory.Space.Device)))
    compiled = function.lower(jnp.ones(64)).compile()
    return compiled.memory_analysis().host_temp_size_in_bytes, float(compiled(jnp.ones(64)).sum())


@fact
def the_host_s_memory_is_one_of_the_device_s() -> Any:
    """What is put there outside of programs, and taken and given by them; it is no HBM."""
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    in_use = device.memory_stats()["bytes_in_use"]
    array = jax.device_put(np.ones(64, np.float32), there)
    held = device.memory_stats()["bytes_in_use"] - in_use
    double = jax.jit(lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Device) * 2, jax.memory.Space.Host), donate_argnums=0)
    result = double(array)
    back = jax.device_put(result, jax.memory.Space.Device)
    asked = jax.jit(lambda x: x + 1, out_shardings=there)(back)
    return {
        "kinds": [m.kind for m in device.addressable_memories()],
        "default": device.default_memory().kind,
        "HBM": held,
        "gone": array.is_deleted(),
        "arrays": [x.sharding.memory_kind for x in (result, back, asked)],
        "values": [float(x.sum()) for x in map(np.asarray, (result, back, asked))],
    }


@fact
def a_serialized_executable_runs() -> Any:
    compiled = jax.jit(lambda x: (x.sum(), x * 1j)).lower(jnp.ones(4)).compile()
    data = serialize_executable.serialize(compiled)
    real, imaginary = serialize_executable.deserialize_and_load(*data, execution_devices=jax.devices()[:1])(jnp.ones(4))
    return float(real), str(np.asarray(imaginary).sum())


@fact
def callers_settings_do_not_matter() -> Any:
    f, x = jax.jit(lambda x: x @ x + 1), jnp.ones((3, 3))
    contexts = (
        jax.disable_jit(),
        jax.debug_nans(True),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("strict"),
        jax.default_device(jax.devices()[1]),
    )
    found = []
    for context in contexts:
        with context:
            found.append(float(f(x).sum()))
    with jax.debug_nans(True):
        return found, raised(lambda: jnp.log(-x))


@fact
def a_call_while_a_function_is_traced() -> Any:
    compiled, x = jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile(), jnp.ones(4)
    return float(jax.jit(lambda y: y + compiled(x)[0])(3.0))


@fact
def printed() -> Any:
    seen: list[float] = []

    @jax.jit
    def f(x: Any) -> Any:
        jax.debug.callback(lambda y: seen.append(float(y)), x.sum())
        return x * 2

    f(jnp.ones(3))
    f(jnp.zeros(3))
    return seen


@fact
def called_in_order() -> Any:
    """With tokens, which go from call to call and from one run to the next."""
    seen: list[float] = []

    @jax.jit
    def f(x: Any) -> Any:
        jax.debug.callback(lambda y: seen.append(float(y)), x, ordered=True)
        jax.debug.callback(lambda y: seen.append(float(y)), x + 1, ordered=True)
        return x, jax.lax.create_token()

    _, token = f(f(1.0)[0] + 4)
    jax.effects_barrier()
    return seen, float(jax.jit(lambda x, t: (x * 2, t))(3.0, token)[0])


@fact
def callbacks_without_results_and_with() -> Any:
    seen: list[float] = []

    @jax.jit
    def f(x: Any) -> Any:
        for n in range(3):
            io_callback(lambda y: seen.append(float(y)), None, x + n, ordered=True)
        io_callback(lambda y: seen.append(float(y.sum())), (), jnp.stack([x, x]))
        return x

    def sine(call: Any, x: Any) -> Any:
        return call(np.sin, jax.ShapeDtypeStruct((), np.float32), x)

    @jax.jit
    def waiting(x: Any) -> Any:
        """Of calls in a loop and a branch, one with JAX's own arithmetic, and one that only tells."""

        def trip(n: Any, y: Any) -> Any:
            io_callback(lambda y: seen.append(float(y)), None, y, ordered=True)
            return jax.lax.cond(n > 0, lambda y: jax.pure_callback(lambda y: jnp.sinh(y) * 0, y, y), lambda y: sine(io_callback, y), y) + n

        return jax.lax.fori_loop(0, 3, trip, sine(jax.pure_callback, x))

    def complain(x: Any) -> Any:
        raise ValueError("three")

    f(1.0)
    jax.effects_barrier()
    failed = raised(lambda: jax.jit(lambda x: jax.pure_callback(complain, x, x))(1.0).block_until_ready())
    return float(waiting(1.0)), seen, failed


@fact
def tokens_have_no_values() -> Any:
    token = jax.jit(lambda x, t: (x, t))(1.0, jax.lax.create_token())[1]
    try:
        return np.asarray(token._buf).tolist()  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        return str(error)


@fact
def threads() -> Any:
    f, arrays, wrong = jax.jit(lambda x: x + 1), [jnp.arange(50.0) + i for i in range(4)], []

    def work(i: int) -> None:
        for _ in range(100):
            if np.asarray(f(arrays[i]))[0] != i + 1:
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return wrong, any(worker.is_alive() for worker in workers)


if __name__ == "__main__":
    np.savez(sys.argv[1], **{f"{name} {i}": x for name in CASES for i, x in enumerate(computed(name))})
    print(json.dumps(FACTS))
