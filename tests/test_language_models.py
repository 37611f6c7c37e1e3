"""Language models compute what transformers' PyTorch models compute: losses, gradients, parameters after training; weights go both ways."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tpuflow
from models import bert, gpt2, llama, mixtral
from tests.language_models import PAIRS, Pair, state_of, to_torch
from tpuflow.errors import WeightsError
from tpuflow.importers import save_state_dict, state_dict

LOSS = 2e-6
"""Relative: fp32 sums in another order than PyTorch's."""
GRADIENT = 1e-4
"""Of each tensor's largest element."""
STEPS, RATE, DECAY = 20, 1e-3, 0.01
ADAMW = 1e-4
"""Of each tensor's largest element after 20 steps of AdamW; measured: 2e-5."""
KEY_BIASES = 2e-2
"""The same of biases of keys: their gradients are rounding, which AdamW scales to steps like any other; measured: 4e-3."""


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param]


def batch_of(pair: Pair, seed: int = 1) -> dict[str, np.ndarray]:
    return pair.batch(pair.config, np.random.default_rng(seed))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_close(pair: Pair, ours: Any, theirs: Any, bound: Callable[[str], float]) -> None:
    """Every element within a bound of its tensor's largest; of one that is 0 but for rounding, within that of one like it.

    A bias of keys adds the same to all scores of a query, which softmax does not see.
    """
    ours, theirs = by_path(ours), by_path(theirs)
    assert ours.keys() == theirs.keys()
    for path, other in theirs.items():
        like = next((path.removesuffix(end) + instead for end, instead in pair.vanishing if path.endswith(end)), path)
        scale = np.abs(theirs[like]).max()
        np.testing.assert_allclose(ours[path] / scale, other / scale, rtol=0, atol=bound(path), err_msg=path)


@pytest.mark.slow
@pytest.mark.torch
def test_the_device_gives_the_loss_and_gradients_of_pytorch(torch, transformers, pair):
    check_loss_and_gradients(torch, pair, pair.twin(transformers, torch), batch_of(pair))


def check_loss_and_gradients(torch: ModuleType, pair: Pair, twin: Any, batch: dict[str, np.ndarray]) -> None:
    """Of our model on the device, against those of its twin."""
    params = pair.variables(state_of(twin))["params"]
    loss = twin(**to_torch(torch, batch)).loss
    loss.backward()
    theirs = pair.variables({name: parameter.grad.numpy() for name, parameter in twin.named_parameters()})["params"]
    ours, gradients = tpuflow.jit(jax.value_and_grad(lambda p: pair.loss_of(p, batch)))(params)
    assert float(ours) == pytest.approx(loss.item(), rel=LOSS)
    assert_close(pair, gradients, theirs, lambda path: GRADIENT)


@pytest.mark.slow
@pytest.mark.torch
def test_the_whole_of_gpt_2_gives_the_loss_and_gradients_of_pytorch(torch, transformers):
    config = dataclasses.replace(gpt2.SIZES["gpt2"], **gpt2.NO_DROPOUT)
    pair = dataclasses.replace(PAIRS["gpt2"], config=config)
    torch.manual_seed(0)
    twin = transformers.GPT2LMHeadModel(transformers.AutoConfig.for_model(**config.to_json()))
    check_loss_and_gradients(torch, pair, twin, batch_of(pair))


@pytest.mark.torch
def test_weights_written_by_us_are_loaded_by_transformers(torch, transformers, pair, tmp_path):
    twin, batch = pair.twin(transformers, torch), batch_of(pair)
    written = state_dict(pair.variables(state_of(twin)), pair.module.torch_layers(pair.config))
    (tmp_path / "config.json").write_text(json.dumps(pair.config.to_json()))
    save_state_dict(tmp_path / "model.safetensors", written)
    loaded, report = getattr(transformers, pair.config.ARCHITECTURE).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    labels = to_torch(torch, batch)
    assert loaded.eval()(**labels).loss.item() == twin(**labels).loss.item()
    assert type(pair.config).from_json(json.loads((tmp_path / "config.json").read_text())).to_json() == pair.config.to_json()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mixtral"])
def test_twenty_steps_of_adamw_end_where_pytorch_ends(torch, transformers, name):
    pair = PAIRS[name]
    twin, batches = pair.twin(transformers, torch), [batch_of(pair, seed) for seed in range(STEPS)]
    params, rule = pair.variables(state_of(twin))["params"], optax.adamw(RATE, weight_decay=DECAY)
    theirs = torch.optim.AdamW(twin.parameters(), lr=RATE, weight_decay=DECAY)
    for batch in batches:
        theirs.zero_grad()
        twin(**to_torch(torch, batch)).loss.backward()
        theirs.step()

    @tpuflow.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = rule.update(jax.grad(pair.loss_of)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = rule.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    ends = pair.variables(state_of(twin))["params"]
    assert_close(pair, params, ends, lambda path: KEY_BIASES if path.endswith(pair.drifting) else ADAMW)


# --- weights and configurations ------------------------------------------------------------------------------------------


def fresh(pair: Pair) -> Any:
    """Variables of our own initialisation, in NumPy."""
    return jax.tree.map(lambda leaf: np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32), pair.like())


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("bin", marks=pytest.mark.torch)])
def test_weights_come_back_from_a_file_as_they_were(pair, tmp_path, kind):
    params = {"params": fresh(pair)["params"]}
    save_state_dict(tmp_path / f"model.{kind}", state_dict(params, pair.module.torch_layers(pair.config)))
    back = tpuflow.load_params(tmp_path / f"model.{kind}", params, mapping=pair.module.torch_layers(pair.config))
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.slow
def test_layers_written_out_and_in_a_scan_take_the_same_files(pair):
    other = dataclasses.replace(pair, config=dataclasses.replace(pair.config, scan=not pair.config.scan))
    written = state_dict(fresh(pair), pair.module.torch_layers(pair.config))
    again = state_dict(other.variables(written), pair.module.torch_layers(other.config))
    assert written.keys() == again.keys()
    batch = batch_of(pair)
    ours, theirs = (jax.jit(one.loss_of)(one.variables(written)["params"], batch) for one in (pair, other))
    assert float(ours) == pytest.approx(float(theirs), rel=LOSS)


PREFIXES = {gpt2: "transformer.", bert: "bert.", llama: "model.", mixtral: "model."}


def test_a_file_may_lack_the_names_of_the_outer_model_and_of_tied_weights(pair):
    variables = fresh(pair)
    written = state_dict(variables, pair.module.torch_layers(pair.config))
    prefix = PREFIXES[pair.module]
    assert any(name.startswith(prefix) for name in written)
    bare = {name.removeprefix(prefix): array for name, array in written.items()}
    jax.tree.map(np.testing.assert_array_equal, pair.variables(bare), {"params": variables["params"]})


def test_every_missing_and_every_extra_name_is_listed(pair):
    written = state_dict(fresh(pair), pair.module.torch_layers(pair.config))
    removed, renamed = list(written)[::5], list(written)[3]
    broken = {name: array for name, array in written.items() if name not in removed} | {f"more.{renamed}": written[renamed]}
    with pytest.raises(WeightsError) as caught:
        pair.variables(broken)
    for name in removed:
        assert f"needs {name}, which is missing" in str(caught.value)
    assert f"more.{renamed} {written[renamed].shape} has no place" in str(caught.value)


def test_a_tied_weight_that_differs_is_an_error():
    pair = PAIRS["gpt2"]
    written = state_dict(fresh(pair), gpt2.torch_layers(pair.config))
    tied = written["transformer.wte.weight"]
    pair.variables({**written, "lm_head.weight": tied})
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not equal to transformer\.wte\.weight"):
        pair.variables({**written, "lm_head.weight": tied + 1})


def test_names_of_files_converted_from_tensorflow_are_read():
    pair = PAIRS["bert"]
    variables = fresh(pair)
    written = state_dict(variables, bert.torch_layers(pair.config))
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): a for n, a in written.items()}
    assert old.keys() != written.keys()
    jax.tree.map(np.testing.assert_array_equal, pair.variables(old), {"params": variables["params"]})


@pytest.mark.parametrize(
    ("module", "json", "message"),
    [
        (gpt2, {"model_type": "llama"}, "model_type is 'llama', expected 'gpt2'"),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, only False is computed"),
        (gpt2, {"n_embd": 30, "n_head": 4}, "n_embd is 30, expected a multiple of n_head, 4"),
        (gpt2, {"n_layer": "12"}, "n_layer is '12', expected int"),
        (gpt2, {"vocab_size": 0}, "vocab_size is 0, expected at least 1"),
        (gpt2, {"activation_function": "gelu_fast"}, "activation_function is 'gelu_fast', expected one of gelu, gelu_new"),
        (bert, {"is_decoder": True}, "is_decoder is True"),
        (bert, {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        (llama, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3', only 'default' is computed"),
        (
            llama,
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads is 6, expected a multiple of num_key_value_heads",
        ),
        (mixtral, {"sliding_window": 4096}, "sliding_window is 4096, only None is computed"),
        (mixtral, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most num_local_experts, 8"),
    ],
)
def test_a_configuration_that_is_not_computed_here_says_why(module, json, message):
    with pytest.raises(ValueError, match=message):
        module.Config.from_json(json)


def test_every_size_is_what_its_own_json_says():
    for module in (gpt2, bert, llama, mixtral):
        for config in module.SIZES.values():
            assert module.Config.from_json(config.to_json()) == config


def test_rotary_positions_are_read_from_old_and_new_files():
    assert llama.Config.from_json({"rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5
    assert llama.Config.from_json({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    assert mixtral.Config.from_json({}).rope_theta == 1e6


# --- dropout and initial weights -----------------------------------------------------------------------------------------

DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt2-untied-scan": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "llama": ("attention_dropout",),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate"), [(name, rate) for name, rates in DROPOUTS.items() for rate in rates])
def test_each_dropout_draws_from_its_stream_in_training_alone(name, rate):
    plain = PAIRS[name]
    pair = dataclasses.replace(plain, config=dataclasses.replace(plain.config, **{rate: 0.5}))
    variables, batch = fresh(pair), pair.call(batch_of(pair))
    train = jax.jit(lambda key: pair.made().apply(variables, **batch, train=True, rngs={"dropout": key}))
    one, same, other = (jax.tree.leaves(train(jax.random.key(seed)))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    evaluated, without = (jax.tree.leaves(jax.jit(p.made().apply)(variables, **batch))[0] for p in (pair, plain))
    np.testing.assert_array_equal(evaluated, without)


@pytest.mark.slow
def test_initial_weights_are_as_the_originals():
    config = dataclasses.replace(gpt2.TINY, n_embd=128, n_layer=8)
    params = jax.jit(gpt2.GPT2(config).init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    assert np.std(params["h_3"]["attn"]["c_attn"]["kernel"]) == pytest.approx(0.02, rel=0.05)
    for part in ("attn", "mlp"):
        assert np.std(params["h_3"][part]["c_proj"]["kernel"]) == pytest.approx(0.02 / 4, rel=0.05), "0.02 / sqrt(2 * 8 layers)"
    words = jax.jit(bert.BertForPreTraining(bert.TINY).init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]["bert"][
        "word_embeddings"
    ]
    assert not words["embedding"][0].any() and words["embedding"][1:].all(), "padding starts with zeros"


def test_the_load_balancing_loss_is_sown_for_the_training():
    pair = PAIRS["mixtral"]
    variables, batch = fresh(pair), pair.call(batch_of(pair))
    variables = {"params": variables["params"]}
    sown = jax.jit(lambda v: pair.made().apply(v, **batch, mutable=["losses"])[1])(variables)
    (loss,) = sown["losses"]["load_balancing"]
    assert 0.02 * 1.9 < float(loss) < 0.02 * 4, "2 experts of 4 for each token: 2 if all are chosen as often"
    quiet = mixtral.Mixtral(dataclasses.replace(pair.config, output_router_logits=False))
    assert "losses" not in jax.eval_shape(lambda v: quiet.apply(v, **batch, mutable=["losses"])[1], variables)
