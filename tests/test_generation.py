"""Text is generated on the device: the tokens of transformers' generate, with a cache that changes nothing, greedy and sampled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import tpuflow
from models.generate import Sampling, generate
from models.gpt2 import GPT2, TINY
from tests.language_models import PAIRS, Pair, state_of

NEW, PROMPT = 64, 7
DECODERS = ["gpt2", "gpt2-untied-scan", "llama", "mixtral"]


def for_generation(pair: Pair) -> Pair:
    """The same with positions for prompt and continuation; without router logits, which fail in transformers' own generation."""
    changes = {"n_positions": 96, "output_router_logits": False}
    known = {field.name for field in dataclasses.fields(pair.config)}
    return dataclasses.replace(pair, config=dataclasses.replace(pair.config, **{k: v for k, v in changes.items() if k in known}))


def prompts(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Three prompts, of which two are shorter and padded on the left; and their mask."""
    tokens = np.random.default_rng(5).integers(4, vocabulary, (3, PROMPT)).astype(np.int32)
    mask = np.ones_like(tokens)
    mask[1, :3] = mask[2, :1] = 0
    return tokens, mask


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation_gives_the_tokens_of_transformers(torch, transformers, name):
    pair = for_generation(PAIRS[name])
    twin = pair.twin(transformers, torch, vectors=False)
    tokens, mask = prompts(pair.config.vocab_size)
    asked = {"input_ids": torch.from_numpy(tokens).long(), "attention_mask": torch.from_numpy(mask).long()}
    theirs = twin.generate(**asked, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)[:, PROMPT:]
    run = tpuflow.jit(functools.partial(generate, pair.made(), new_tokens=NEW))
    ours = run(pair.variables(state_of(twin)), tokens, attention_mask=mask)
    np.testing.assert_array_equal(ours, theirs.numpy())
    assert all(len(np.unique(row)) > 8 for row in theirs.numpy()), "tokens that repeat show little"


@pytest.fixture(scope="module")
def small() -> tuple[GPT2, Any]:
    """A tiny model and its random variables, spread enough for its tokens to vary."""
    model = GPT2(dataclasses.replace(TINY, n_positions=48))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda leaf: rng.normal(0.05, 0.2, leaf.shape).astype(np.float32), variables)


@pytest.mark.slow
def test_a_cache_gives_the_logits_of_all_tokens_at_once(small):
    model, variables = small
    tokens = jnp.asarray(prompts(TINY.vocab_size)[0])
    whole = jax.jit(model.apply)(variables, tokens)
    decode = jax.jit(functools.partial(model.apply, method="decode"))
    logits, cache = decode(variables, tokens[:, :4], model.empty_cache(3, 12))
    found = [logits]
    for place in range(4, PROMPT):
        logits, cache = decode(variables, tokens[:, place : place + 1], cache)
        found.append(logits)
    np.testing.assert_allclose(np.stack(found, 1), whole[:, 3:], rtol=0, atol=2e-5)
    assert int(cache.filled) == PROMPT and int(cache.attended.sum()) == 3 * PROMPT


def test_the_program_of_a_generation_is_one_loop(small):
    model, variables = small
    tokens = jnp.zeros((1, 4), jnp.int32)
    few, many = (tpuflow.jit(functools.partial(generate, model, new_tokens=n)).lower(variables, tokens).compile() for n in (8, 40))
    assert abs(len(tuple(few.executable.program.kernels())) - len(tuple(many.executable.program.kernels()))) <= 2, "trips are no kernels"


@pytest.mark.slow
def test_sampled_tokens_follow_the_key_and_the_most_probable_one_is_greedy(small):
    model, variables = small
    tokens = jnp.asarray(prompts(TINY.vocab_size)[0])
    greedy = jax.jit(functools.partial(generate, model, new_tokens=12))(variables, tokens)

    @functools.partial(tpuflow.jit, static_argnums=0)
    def sampled(sampling: Sampling, key: jax.Array) -> jax.Array:
        return generate(model, variables, tokens, 12, sampling=sampling, key=key)

    key, warm = jax.random.key(1), Sampling(temperature=2.0)
    assert np.array_equal(sampled(warm, key), sampled(warm, key))
    assert not np.array_equal(sampled(warm, key), sampled(warm, jax.random.key(2)))
    assert np.array_equal(sampled(Sampling(top_k=1), key), greedy)


@pytest.mark.slow
def test_only_the_most_probable_tokens_are_drawn(small):
    model, variables = small
    tokens = jnp.zeros((64, 1), jnp.int32)
    sampling = Sampling(temperature=5.0, top_k=3)
    drawn = jax.jit(functools.partial(generate, model, new_tokens=1, sampling=sampling))(variables, tokens, key=jax.random.key(0))
    most = jax.lax.top_k(model.apply(variables, tokens[:1])[0, -1], 3)[1]
    assert set(np.ravel(drawn)) == set(np.asarray(most))


@pytest.mark.slow
def test_a_sequence_that_is_over_stays_so(small):
    model, variables = small
    tokens = jnp.asarray(prompts(TINY.vocab_size)[0])
    free = np.asarray(jax.jit(functools.partial(generate, model, new_tokens=12))(variables, tokens))
    end = int(free[0, 5])
    ended = np.asarray(jax.jit(functools.partial(generate, model, new_tokens=12, end=end))(variables, tokens))
    for one, other in zip(ended, free, strict=True):
        over = np.flatnonzero(other == end)
        expected = other if not len(over) else np.where(np.arange(12) < over[0], other, end)
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"new_tokens": 60}, "66 in a row, expected at most 48"),
        ({"new_tokens": 4, "sampling": Sampling()}, "give a key"),
    ],
)
def test_what_cannot_be_generated_says_why(small, options, message):
    model, variables = small
    with pytest.raises(ValueError, match=message):
        generate(model, variables, jnp.zeros((1, PROMPT), jnp.int32), **options)


@pytest.mark.parametrize(("options", "message"), [({"temperature": 0.0}, "temperature is 0"), ({"top_k": 0}, "top_k is 0")])
def test_a_sampling_that_is_none_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
