"""The networks of models/ compute what their PyTorch twins compute, training statistics and gradients included."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from models import alexnet, bert, cifar_net, googlenet, lenet, relu_reduce_mean_dense, resnet, squeezenet, vgg, wide_resnet
from models.bam import BottleneckAttention
from tests.language_models import state_of
from tpuflow.importers import flax_params
from train.pretrained import from_torch

TOLERANCE = 1e-4
"""Of the largest value: fp32 sums of up to 25088 products, in another order than PyTorch's."""

EVEN = resnet.TORCHVISION


def _resnet_rows(style: resnet.Style, even: bool) -> dict[str, tuple[Any, ...]]:
    """Two small residual networks (all blocks, few channels) of one style; the real ones differ only in the numbers."""
    options = {"classes": 5, "even": even, "epsilon": style.epsilon, "width": 8}
    return {
        f"resnet-{name}": (
            resnet.ResNet(block, stages, 5, style, width=8),
            functools.partial(lambda t, s, b: t.ResNet(s, bottleneck=b, **options), s=stages, b=block is resnet.Bottleneck),
            (64, 64, 3),
        )
        for name, block, stages in (("basic", resnet.Basic, (2, 1, 1, 1)), ("bottleneck", resnet.Bottleneck, (2, 1, 1, 2)))
    }


CASES: dict[str, tuple[Any, Callable[[ModuleType], Any], tuple[int, int, int]]] = {
    "relu-reduce-mean-dense": (relu_reduce_mean_dense.ReLUReduceMeanDense(7), lambda t: t.ReLUReduceMeanDense(12, 7), (5, 4, 12)),
    "lenet5": (lenet.LeNet5(), lambda t: t.SmallNet(1, conv_bias=False), (32, 32, 1)),
    "cifar-net": (cifar_net.CifarNet(), lambda t: t.SmallNet(3, conv_bias=True), (32, 32, 3)),
    "vgg16-at-32": (vgg.VGG16(5, hidden=24), lambda t: t.VGG16(5, 24), (32, 32, 3)),
    "vgg16-at-96x64": (vgg.VGG16(5, hidden=24), lambda t: t.VGG16(5, 24), (96, 64, 3)),
    "squeezenet-1.0": (squeezenet.SqueezeNet(5), lambda t: t.SqueezeNet("1.0", 5), (48, 52, 3)),
    "squeezenet-1.1": (squeezenet.SqueezeNet(5, "1.1"), lambda t: t.SqueezeNet("1.1", 5), (48, 52, 3)),
    **{f"{name}-same": row for name, row in _resnet_rows(resnet.MINDSPORE, even=False).items()},
    **{f"{name}-even": row for name, row in _resnet_rows(EVEN, even=True).items()},
}

LAYERS: dict[type, Any] = {
    relu_reduce_mean_dense.ReLUReduceMeanDense: lambda _: relu_reduce_mean_dense.TORCH_LAYERS,
    lenet.LeNet5: lambda _: lenet.TORCH_LAYERS,
    cifar_net.CifarNet: lambda _: cifar_net.TORCH_LAYERS,
    vgg.VGG16: lambda _: vgg.TORCH_LAYERS,
    squeezenet.SqueezeNet: squeezenet.torch_layers,
    resnet.ResNet: resnet.torch_layers,
}


@pytest.fixture
def twins(torch: ModuleType) -> ModuleType:
    """The PyTorch networks."""
    from train import torch_models

    torch.manual_seed(0)
    return torch_models


def _unsettle(torch: ModuleType, network: Any) -> None:
    """Random statistics, scales and biases instead of zeros and ones, which would hide mistakes."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                for tensor, low, high in (
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.5, 0.5),
                    (module.running_mean, -0.5, 0.5),
                    (module.running_var, 0.5, 2),
                ):
                    tensor.uniform_(low, high)


def _converted(torch: ModuleType, twins: ModuleType, case: str, batch: int = 2) -> tuple[Any, Any, dict[str, Any], np.ndarray]:
    """(Flax model, PyTorch model, the variables of the first with the weights of the second, images [B, H, W, C])."""
    model, make, shape = CASES[case]
    network = make(twins)
    _unsettle(torch, network)
    variables = from_torch(model, state_of(network), LAYERS[type(model)](model), shape)
    return model, network, variables, np.random.default_rng(1).standard_normal((batch, *shape)).astype(np.float32)


def _to_torch(torch: ModuleType, images: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))  # [B, H, W, C] -> [B, C, H, W]


def _assert_close(ours: Any, theirs: np.ndarray, what: str = "") -> None:
    scale = max(1e-6, float(np.abs(theirs).max()))
    np.testing.assert_allclose(np.asarray(ours) / scale, theirs / scale, rtol=0, atol=TOLERANCE, err_msg=what)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_evaluation_gives_the_logits_of_pytorch(torch, twins, case):
    model, network, variables, images = _converted(torch, twins, case)
    network.eval()
    with torch.no_grad():
        expected = network(_to_torch(torch, images)).numpy()
    assert expected.std() > 1e-3 * np.abs(expected).mean(), "logits that hardly vary show nothing"
    _assert_close(jax.jit(model.apply)(variables, images), expected)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("resnet")])
def test_training_moves_batch_statistics_as_pytorch_does(torch, twins, case):
    model, network, variables, images = _converted(torch, twins, case, batch=4)
    network.train()
    with torch.no_grad():
        expected = network(_to_torch(torch, images)).numpy()
    ours, changed = jax.jit(functools.partial(model.apply, train=True, mutable=["batch_stats"]))(variables, images)
    _assert_close(ours, expected)
    after = flax_params(state_of(network), variables, LAYERS[type(model)](model))["batch_stats"]
    moved = jax.tree.map(lambda old, new: float(np.abs(old - new).max()), variables["batch_stats"], after)
    assert min(jax.tree.leaves(moved)) > 1e-3, "every statistic must move, or the comparison shows nothing"
    jax.tree.map(_assert_close, changed["batch_stats"], after)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("case", ["lenet5", "cifar-net", "squeezenet-1.1", "resnet-bottleneck-same", "resnet-basic-even"])
def test_gradients_are_those_of_pytorch(torch, twins, case):
    model, network, variables, images = _converted(torch, twins, case, batch=4)
    labels = np.arange(4) % 5
    statistics = {name: tree for name, tree in variables.items() if name != "params"}
    network.train(mode=case.startswith("resnet"))
    torch.nn.functional.cross_entropy(network(_to_torch(torch, images)), torch.from_numpy(labels)).backward()
    theirs = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}

    def loss_of(params: Any) -> jax.Array:
        inputs = {"params": params, **statistics}
        logits = model.apply(inputs, images, train=True, mutable=["batch_stats"])[0] if statistics else model.apply(inputs, images)
        return -jax.nn.log_softmax(logits)[jnp.arange(4), labels].mean()

    ours = jax.jit(jax.grad(loss_of))(variables["params"])
    layers = LAYERS[type(model)](model)
    jax.tree.map(_assert_close, ours, from_torch(model, {**state_of(network), **theirs}, layers, CASES[case][2])["params"])


def _parameters(model: Any, shape: tuple[int, ...]) -> int:
    like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))
    return sum(leaf.size for leaf in jax.tree.leaves(like["params"]))


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (resnet.resnet18(1000), 11_689_512),
        (resnet.resnet34(1000), 21_797_672),
        (resnet.resnet50(1000), 25_557_032),
        (resnet.resnet101(1000), 44_549_160),
        (resnet.resnet152(1000), 60_192_808),
        (vgg.VGG16(), 138_357_544),
        (squeezenet.SqueezeNet(), 1_248_424),
        (squeezenet.SqueezeNet(version="1.1"), 1_235_496),
        (alexnet.AlexNet(), 61_100_840),
        (googlenet.GoogLeNet(), 6_624_904),
        (wide_resnet.WideResNet(depth=28, classes=100), 36_536_884),
    ],
    ids=lambda value: None if isinstance(value, int) else type(value).__name__,
)
def test_networks_have_as_many_parameters_as_published(model, published):
    assert _parameters(model, (224, 224, 3)) == published


@pytest.mark.parametrize(("name", "published"), [("bert-base-uncased", 109_482_240), ("bert-large-uncased", 335_141_888)])
@pytest.mark.parametrize("scan", [False, True])
def test_berts_have_as_many_parameters_as_published(name, published, scan):
    model = bert.BertForPreTraining(dataclasses.replace(bert.SIZES[name], scan=scan))
    like = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(like["params"]["bert"])) == published


@pytest.mark.slow
def test_masked_words_are_seen_from_both_sides_and_padding_from_none():
    model = bert.BertForPreTraining(bert.TINY)
    words, asked = jnp.arange(1, 17)[None], jnp.array([[5, 2]])
    variables = jax.jit(model.init)(jax.random.key(0), words)
    apply = jax.jit(lambda words, mask: model.apply(variables, words, mask, masked_positions=asked))
    (everywhere, _), (logits, _) = jax.jit(model.apply)(variables, words), apply(words, jnp.ones_like(words))
    assert logits.shape == (1, 2, bert.TINY.vocab_size)
    np.testing.assert_allclose(logits, everywhere[:, asked[0]], rtol=0, atol=1e-6)
    for place in (0, 15):
        assert not jnp.allclose(apply(words.at[0, place].set(90), jnp.ones_like(words))[0], logits)
    mask = jnp.ones_like(words).at[0, 15].set(0)
    assert jnp.array_equal(apply(words, mask)[0], apply(words.at[0, 15].set(90), mask)[0])


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (alexnet.AlexNet(7, alexnet.MINDSPORE), (227, 227, 3)),
        (googlenet.GoogLeNet(7), (64, 96, 3)),
        (wide_resnet.WideResNet(10, 2, 7), (32, 32, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_networks_that_only_the_bench_uses_train(model, shape):
    images = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def train(variables: Any, images: jax.Array) -> Any:
        return model.apply(variables, images, train=True, rngs={"dropout": jax.random.key(1)}, mutable=["batch_stats"])

    logits, changed = jax.eval_shape(train, variables, images)
    assert logits.shape == (2, 7)
    assert jax.tree.structure(changed.get("batch_stats")) == jax.tree.structure(variables.get("batch_stats"))


@pytest.mark.torch
@pytest.mark.parametrize("depth", [50, 101])
def test_every_tensor_of_the_real_residual_networks_finds_its_place(torch, twins, depth):
    model = {50: resnet.resnet50, 101: resnet.resnet101}[depth](10)
    with torch.device("meta"):
        network = twins.ResNet(model.stages, bottleneck=True, classes=10, even=False, epsilon=1e-4)
    state = {name: np.broadcast_to(np.float32(0), tuple(tensor.shape)) for name, tensor in network.state_dict().items()}
    variables = from_torch(model, state, resnet.torch_layers(model), (32, 32, 3))
    assert set(variables) == {"params", "batch_stats"}


@pytest.mark.slow
@pytest.mark.torch
def test_the_real_resnet_50_gives_the_logits_of_pytorch(torch, twins):
    model = resnet.resnet50(10)
    network = twins.ResNet(model.stages, bottleneck=True, classes=10, even=False, epsilon=1e-4)
    _unsettle(torch, network)
    network.eval()
    images = np.random.default_rng(1).standard_normal((2, 64, 64, 3)).astype(np.float32)
    with torch.no_grad():
        expected = network(_to_torch(torch, images)).numpy()
    variables = from_torch(model, state_of(network), resnet.torch_layers(model), (64, 64, 3))
    _assert_close(jax.jit(model.apply)(variables, images), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "last"), [(resnet.Basic, "bn2"), (resnet.Bottleneck, "bn3")])
def test_a_fresh_residual_block_is_its_shortcut(block, last):
    block = block(4, 1, resnet.MINDSPORE)
    images = jnp.ones((1, 4, 4, 4 * block.expansion))
    variables = jax.jit(block.init, static_argnums=2)(jax.random.key(0), images, False)
    scales = {name: np.asarray(part["scale"]) for name, part in variables["params"].items() if "scale" in part}
    assert {name for name, scale in scales.items() if not scale.any()} == {last}
    np.testing.assert_array_equal(block.apply(variables, images, False), images)


@pytest.mark.slow
def test_lenet_starts_from_a_normal_distribution_cut_at_two_deviations():
    params = jax.jit(lenet.LeNet5().init)(jax.random.key(0), jnp.zeros((1, 32, 32, 1)))["params"]
    assert set(params["conv1"]) == {"kernel"}
    drawn = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
    assert np.abs(drawn).max() <= 0.04
    assert abs(drawn.std() - 0.8796 * 0.02) < 3e-4  # a standard normal cut at two deviations has deviation 0.8796
    assert min(np.ravel(layer["bias"]).std() for name, layer in params.items() if name.startswith("fc")) > 0.005


def test_relu_reduce_mean_dense_of_ones_sums_the_means():
    images = np.random.default_rng(0).standard_normal((3, 4, 4, 6)).astype(np.float32)
    model = relu_reduce_mean_dense.ReLUReduceMeanDense(5)
    logits = model.apply(model.init(jax.random.key(0), images), images)
    np.testing.assert_allclose(logits, np.repeat(np.maximum(images, 0).mean((1, 2)).sum(1, keepdims=True) + 1, 5, axis=1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [vgg.VGG16(3, hidden=8), squeezenet.SqueezeNet(3, "1.1")], ids=lambda model: type(model).__name__)
def test_dropout_is_random_in_training_only(model):
    images = np.random.default_rng(0).standard_normal((1, 32, 32, 3)).astype(np.float32)
    variables = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.02), jax.eval_shape(model.init, jax.random.key(0), images))
    train = jax.jit(lambda seed: model.apply(variables, images, train=True, rngs={"dropout": jax.random.key(seed)}))
    assert not np.array_equal(train(1), train(2))
    assert np.isfinite(jax.jit(model.apply)(variables, images)).all()  # without a stream to draw from


@pytest.mark.slow
def test_bottleneck_attention_scales_every_place_and_channel_by_one_to_two() -> None:
    """1 + sigmoid(channels + places), between the stages of a residual network."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6, 5, 32)) + 5.0, jnp.float32)
    y, variables = BottleneckAttention().init_with_output(jax.random.key(0), x, True)
    scale = np.asarray(y / x)
    assert scale.min() > 1.0 and scale.max() < 2.0
    score = np.log((scale - 1) / (2 - scale))  # channels [3, 1, 1, 32] + places [3, 6, 5, 1]: no more than the two
    apart = score - score.mean((1, 2), keepdims=True) - score.mean(3, keepdims=True) + score.mean((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(apart, 0.0, atol=1e-3)
    model = resnet.ResNet(resnet.Basic, (1, 1, 1, 1), 5, width=8, between=BottleneckAttention)
    made = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32))
    assert {name for name in made["params"] if name.startswith("between")} == {"between1", "between2", "between3"}
    assert variables["params"]["place_in"]["kernel"].shape == (1, 1, 32, 2)
