"""Training steps for `bench.programs`, at the sizes of public examples: name -> a step (state, batch) -> (state, loss), its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bench import program_models as networks
from bench.program_operations import Made, Make, floats, integers
from models import bert, gpt2, llama
from models.cifar_net import CifarNet
from models.lenet import LeNet5
from models.mlp import MLP
from models.resnet import resnet18
from models.squeezenet import SqueezeNet

Loss = Callable[[Any, Any], Any]
"""(what the model gives, targets) -> 0-d."""


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_error(found: Any, wanted: Any) -> Any:
    """Mean over all elements."""
    return jnp.mean((found - wanted) ** 2)


def evidence_bound(found: Any, images: Any) -> Any:
    """flax/examples/vae: binary cross-entropy and divergence from the normal distribution."""
    logits, mean, log_variance = found
    error = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
    return jnp.mean(error - 0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1))


def words_and_sentences(found: Any, labels: Any) -> Any:
    """BERT's pretraining."""
    return cross_entropy(found[0], labels[0]) + cross_entropy(found[1], labels[1])


def step(model: nn.Module, inputs: tuple[Any, ...], targets: Any, loss: Loss, rule: Any, **options: Any) -> Made:
    """A step of a model on a batch; collections beside its parameters, as batch statistics, change with it."""
    variables = jax.jit(functools.partial(model.init, **options))(jax.random.key(0), *inputs)
    params, rest = variables["params"], {name: held for name, held in variables.items() if name != "params"}

    def loss_of(params: Any, rest: Any, batch: Any) -> tuple[Any, Any]:
        found, changed = model.apply({**rest, "params": params}, *batch[0], mutable=list(rest), **options)
        return loss(found, batch[1]), changed

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, rest, memory = state
        (value, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, rest, batch)
        updates, memory = rule.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), rest, memory), value

    return train_step, ((params, rest, rule.init(params)), (inputs, targets))


def _classifier(model: nn.Module, images: tuple[int, ...], rule: Any = None, classes: int = 10, **options: Any) -> Made:
    rule = optax.sgd(0.1, 0.9) if rule is None else rule
    return step(model, (floats(*images),), integers(classes, images[0]), cross_entropy, rule, **options)


def _reader(model: nn.Module, tokens: tuple[int, int], vocabulary: int) -> Made:
    """A language model: the targets are as many as the tokens."""
    return step(model, (integers(vocabulary, *tokens),), integers(vocabulary, *tokens), cross_entropy, optax.adamw(1e-3))


def _sentences(cell: Any, tokens: tuple[int, int]) -> Made:
    return step(networks.Recurrent(cell), (integers(10_000, *tokens),), integers(2, tokens[0]), cross_entropy, optax.adam(1e-3))


def _reconstruction(model: nn.Module) -> Made:
    return step(model, (floats(8, 32, 32, 3),), floats(8, 32, 32, 3), squared_error, optax.adam(1e-3))


def _vae() -> Made:
    images = abs(floats(128, 784)) % 1
    return step(networks.VAE(), (images, floats(128, 20)), images, evidence_bound, optax.adam(1e-3))


def _seq2seq() -> Made:
    one_hot = jax.nn.one_hot
    queries, answers = one_hot(integers(17, 128, 9), 17), one_hot(integers(17, 128, 6), 17)
    return step(networks.Seq2Seq(), (queries, answers), integers(17, 128, 6), cross_entropy, optax.adam(3e-3))


def _gpt2() -> Made:
    config = gpt2.Config(vocab_size=65, n_positions=64, n_embd=128, n_layer=4, n_head=4, **gpt2.NO_DROPOUT)
    return _reader(gpt2.GPT2(config), (12, 64), 65)


def _llama() -> Made:
    config = llama.Config(
        vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=128
    )
    return _reader(llama.Llama(config), (4, 128), 512)


def _bert() -> Made:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    model = bert.BertForPreTraining(bert.Config(**sizes, **bert.NO_DROPOUT))
    words = integers(30522, 8, 64)
    return step(model, (words,), (words, integers(2, 8)), words_and_sentences, optax.adamw(1e-4))


def _graph() -> Made:
    edges = integers(500, 2, 2000)
    return step(networks.GraphConvolution(), (floats(500, 32), *edges), integers(10, 500), cross_entropy, optax.adam(1e-3))


def _words() -> Made:
    inputs = (integers(20_000, 256), integers(20_000, 256, 6))
    targets = jnp.eye(6)[jnp.zeros(256, jnp.int32)]
    return step(networks.SkipGram(), inputs, targets, lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean(), optax.sgd(0.1))


def _regression() -> Made:
    return step(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(1)]), (floats(32, 1),), floats(32, 1), squared_error, optax.sgd(0.1))


STEPS: Mapping[str, Make] = {
    "regression, 32": _regression,
    "MLP, 64": lambda: _classifier(MLP(), (64, 784), optax.sgd(1e-3)),
    "MNIST CNN, 128": lambda: _classifier(networks.ConvClassifier(), (128, 28, 28, 1)),
    "LeNet-5, 32": lambda: _classifier(LeNet5(), (32, 32, 32, 1)),
    "CIFAR-10 network, 4": lambda: _classifier(CifarNet(), (4, 32, 32, 3)),
    "ResNet-18, 32x32, 16": lambda: _classifier(resnet18(), (16, 32, 32, 3), train=True),
    "SqueezeNet, 64x64, 4": lambda: _classifier(SqueezeNet(10, "1.1"), (4, 64, 64, 3)),
    "MLP-Mixer, 32": lambda: _classifier(networks.Mixer(), (32, 32, 32, 3), optax.adamw(1e-3)),
    "ViT, 32": lambda: _classifier(networks.VisionTransformer(), (32, 32, 32, 3), optax.adamw(1e-3)),
    "actor and critic, 32": lambda: _classifier(networks.ActorCritic(), (32, 84, 84, 4), optax.adam(1e-3), 7),
    "VAE, 128": _vae,
    "UNet, 8": lambda: _reconstruction(networks.UNet()),
    "autoencoder, 8": lambda: _reconstruction(networks.Autoencoder()),
    "seq2seq, 128": _seq2seq,
    "GRU both ways, 32": lambda: _sentences(nn.GRUCell, (32, 40)),
    "LSTM both ways, 32": lambda: _sentences(nn.OptimizedLSTMCell, (32, 40)),
    "LSTM language model, 20": lambda: _reader(networks.RecurrentLanguageModel(), (20, 35), 1000),
    "GPT of characters, 12": _gpt2,
    "Llama, 4": _llama,
    "BERT-tiny, 8": _bert,
    "graph network, 500": _graph,
    "skip-gram, 256": _words,
}
