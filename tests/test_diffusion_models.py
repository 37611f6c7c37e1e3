"""The models of text-to-image diffusion compute on the device what diffusers' and transformers' do: outputs, losses, gradients."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import tpuflow
from models import autoencoder_kl, clip_text, diffusers_configs, unet_2d_condition
from models.attention import attend, attend_in_blocks
from tests.diffusion_models import PAIRS, TEXT, UNET, UNET_2, VAE, Pair, normal, state_of, to_numpy, to_torch
from tpuflow.errors import WeightsError
from tpuflow.importers import flax_params, state_dict
from train.diffusion.folders import PARTS

VANISHING = (("['to_k']['bias']", "['to_q']['bias']"), ("['k_proj']['bias']", "['q_proj']['bias']"))
"""A bias of keys adds the same to all scores of a query: its gradient is 0 but for rounding, and is compared with the queries' own."""


def device(pair: Pair, variables: Any, target: np.ndarray) -> Any:
    """((loss, outputs), gradients) of one Program."""
    return tpuflow.jit(jax.value_and_grad(pair.loss, has_aux=True))(variables, target, *pair.inputs)


def gap(found: Any, expected: Any) -> dict[str, float]:
    """Path of a leaf -> the largest difference, relative to the largest element; see `VANISHING`."""
    keyed = jax.tree_util.tree_leaves_with_path
    largest = {jax.tree_util.keystr(path): np.abs(leaf).max() for path, leaf in keyed(expected)}
    apart = {jax.tree_util.keystr(path): np.abs(leaf).max() for path, leaf in keyed(jax.tree.map(np.subtract, found, expected))}
    return {name: float(difference / largest[_scaled_by(name)]) for name, difference in apart.items()}


def _scaled_by(name: str) -> str:
    return next((name.removesuffix(end) + instead for end, instead in VANISHING if name.endswith(end)), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["text-1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unet-1", "unet-2", "vae"))])
def test_outputs_losses_and_gradients_are_those_of_the_original(
    diffusers: ModuleType, transformers: ModuleType, torch: ModuleType, name: str
) -> None:
    pair = PAIRS[name]
    network = pair.twin(diffusers, transformers, torch)
    target = np.float32(0.5) * np.ones((1,), np.float32)
    loss, outputs, gradients = pair.theirs(torch, network, target)
    (ours, found), slopes = device(pair, pair.variables(state_of(network)), target)
    assert ours == pytest.approx(loss, rel=1e-5)
    assert gap({"": found}, {"": outputs})["['']"] < 1e-4
    worst = gap(slopes, gradients)
    assert max(worst.values()) < 1e-3, max(worst, key=lambda path: worst[path])


@pytest.mark.slow
@pytest.mark.torch
def test_an_image_is_encoded_and_decoded_as_by_the_original(diffusers: ModuleType, transformers: ModuleType, torch: ModuleType) -> None:
    pair = PAIRS["vae"]
    network = pair.twin(diffusers, transformers, torch)
    with torch.no_grad():
        expected = to_numpy(pair.call(network, *(to_torch(torch, array) for array in pair.inputs)))
    found = tpuflow.jit(PARTS["vae"].model(VAE).apply)(pair.variables(state_of(network)), *pair.inputs)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_bits() -> None:
    x, time, text = normal(2, 8, 8, 8), normal(2, 16), normal(2, 5, 24)
    found = []
    for checkpointing in (False, True):
        config = dataclasses.replace(UNET, gradient_checkpointing=checkpointing)
        block = unet_2d_condition.DownBlock(unet_2d_condition.Level(config, 16, 4, 1, resized=True))
        like = jax.eval_shape(block.init, jax.random.key(0), x, time, text)
        variables = jax.tree.map(lambda leaf: np.float32(0.2) * normal(*leaf.shape), like)

        def loss(variables: Any, block: Any = block) -> jax.Array:
            return jax.numpy.sin(block.apply(variables, x, time, text)[0]).sum()

        traced = jax.make_jaxpr(jax.grad(loss))(variables)
        assert ("remat" in str(traced)) == checkpointing
        found.append(tpuflow.jit(jax.value_and_grad(loss), engine="reference")(variables))
    jax.tree.map(np.testing.assert_array_equal, found[1], found[0])


@pytest.mark.slow
def test_stable_diffusion_has_its_parameters() -> None:
    expected = {"unet": 859_520_964, "text_encoder": 123_060_480, "vae": 83_653_863}
    vae = autoencoder_kl.Config(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(128, 256, 512, 512),
        layers_per_block=2, sample_size=512,
    )  # fmt: skip
    name = "CompVis/stable-diffusion-v1-4"
    configs = {"unet": unet_2d_condition.SIZES[name], "text_encoder": clip_text.SIZES[name], "vae": vae}
    for part, config in configs.items():
        assert sum(leaf.size for leaf in jax.tree.leaves(PARTS[part].variables_like(config))) == expected[part]


@pytest.mark.parametrize("name", PAIRS)
def test_weights_come_back_as_they_were(name: str) -> None:
    pair = PAIRS[name]
    part = PARTS[pair.part]
    like = part.variables_like(pair.config)
    variables = jax.tree.map(lambda leaf: normal(*leaf.shape), like)
    names = part.names(pair.config, like)
    again = flax_params(state_dict(variables, names), like, names)
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_older_files_of_the_autoencoder_are_read() -> None:
    like = PARTS["vae"].variables_like(VAE)
    variables = jax.tree.map(lambda leaf: normal(*leaf.shape), like)
    tensors = state_dict(variables, autoencoder_kl.torch_layers(like))
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {functools.reduce(lambda text, pair: text.replace(*pair), older.items(), name): array for name, array in tensors.items()}
    assert sum("proj_attn" in name for name in renamed) == 4
    again = flax_params(renamed, like, autoencoder_kl.torch_layers(like))
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_missing_and_left_over_tensors_are_all_named() -> None:
    like = PARTS["unet"].variables_like(UNET)
    names = diffusers_configs.torch_layers(like)
    tensors = state_dict(jax.tree.map(lambda leaf: normal(*leaf.shape), like), names)
    lost = [name for name in tensors if "attn2.to_k" in name]
    more = {f"{name}.extra": tensors.pop(name) for name in lost}
    with pytest.raises(WeightsError) as caught:
        flax_params({**tensors, **more}, like, names)
    assert len(lost) == 4
    assert all(f"needs {name}, which is missing" in str(caught.value) for name in lost)
    assert all(name in str(caught.value) for name in more)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (UNET, {"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL', expected 'UNet2DConditionModel'"),
        (UNET, {"addition_embed_type": "text_time"}, "addition_embed_type is 'text_time', only None is computed"),
        (UNET, {"transformer_layers_per_block": [1, 2]}, r"transformer_layers_per_block is \[1, 2\], only 1 is computed"),
        (UNET, {"down_block_types": ["AttnDownBlock2D", "DownBlock2D"]}, "has 'AttnDownBlock2D', expected CrossAttnDownBlock2D or"),
        (UNET, {"up_block_types": ["UpBlock2D"]}, "up_block_types has 1 blocks and block_out_channels 2 widths"),
        (UNET, {"attention_head_dim": [4]}, "attention_head_dim is .4,., expected a number from 1 on, or one for each block"),
        (UNET, {"attention_head_dim": 5}, "a width in block_out_channels is 16, expected a multiple of its number of heads, 5"),
        (UNET, {"norm_num_groups": 5}, "a width in block_out_channels is 16, expected a multiple of norm_num_groups, 5"),
        (VAE, {"use_quant_conv": False}, "use_quant_conv is False, only True is computed"),
        (VAE, {"latent_channels": "4"}, "latent_channels is '4', expected int"),
        (TEXT, {"model_type": "bert"}, "model_type is 'bert', expected 'clip_text_model'"),
        (TEXT, {"hidden_act": "gelu_none"}, "hidden_act is 'gelu_none', expected one of gelu, "),
    ],
)
def test_a_configuration_that_is_not_computed_here_says_what_it_is(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        type(config).from_json({**config.to_json(), **changes})


@pytest.mark.parametrize("config", [UNET, UNET_2, VAE, TEXT])
def test_a_configuration_is_read_as_it_was_written(config: Any) -> None:
    assert type(config).from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("part", "config", "shapes", "message"),
    [
        ("unet", UNET, ((1, 7, 8, 4), (), (1, 3, 24)), "latents of 7x8 with 4 channels: expected multiples of 2"),
        ("unet", UNET, ((1, 8, 8, 4), (), (1, 3, 20)), "the text's width is 20, expected 24, cross_attention_dim"),
        ("vae", VAE, ((1, 15, 16, 3),), "images of 15x16: expected multiples of 2"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(part: str, config: Any, shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    inputs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(PARTS[part].model(config).init, jax.random.key(0), *inputs)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens: 13 in a row, expected at most 12"):
        jax.eval_shape(clip_text.CLIPTextModel(TEXT).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 13), np.int32))


def test_a_checkpointed_configuration_is_the_same_file() -> None:
    assert dataclasses.replace(UNET, gradient_checkpointing=True).to_json() == UNET.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("most", [5, 12])
def test_attention_in_blocks_of_queries_is_attention(most: int) -> None:
    q, k, v = normal(2, 12, 4, 3), normal(2, 7, 2, 3), normal(7, 2, 2, 3).swapaxes(0, 1)

    def loss(attention: Any, *arrays: Any) -> jax.Array:
        return jax.numpy.sum(jax.numpy.sin(attention(*arrays)))

    in_blocks = functools.partial(attend_in_blocks, most=most)
    found, slopes = tpuflow.jit(jax.value_and_grad(functools.partial(loss, in_blocks), (0, 1, 2)))(q, k, v)
    expected, theirs = jax.value_and_grad(functools.partial(loss, functools.partial(attend, visible=None)), (0, 1, 2))(q, k, v)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(slopes, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
