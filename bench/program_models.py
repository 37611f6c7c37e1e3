"""Small Flax networks of `bench.programs`, of the kinds and sizes that public examples have and `models/` has not."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class ConvClassifier(nn.Module):
    """flax/examples/mnist: two 3x3 convolutions with mean pooling, two dense layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features in (32, 64):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1))))


class VAE(nn.Module):
    """flax/examples/vae: 784 - 500 - 20 latents - 500 - 784; the noise is an argument. Gives (logits, means, logarithms of variances)."""

    @nn.compact
    def __call__(self, x: Any, noise: Any) -> Any:
        hidden = nn.relu(nn.Dense(500)(x))
        mean, log_variance = nn.Dense(20)(hidden), nn.Dense(20)(hidden)
        latents = mean + jnp.exp(0.5 * log_variance) * noise
        return nn.Dense(784)(nn.relu(nn.Dense(500)(latents))), mean, log_variance


class Seq2Seq(nn.Module):
    """flax/examples/seq2seq with teacher forcing: LSTMs of 512 over one-hot characters."""

    @nn.compact
    def __call__(self, queries: Any, answers: Any) -> Any:
        carry, _ = nn.RNN(nn.LSTMCell(512), return_carry=True)(queries)
        return nn.Dense(answers.shape[-1])(jnp.asarray(nn.RNN(nn.LSTMCell(512))(answers, initial_carry=carry)))


class Recurrent(nn.Module):
    """Embedding, a recurrent network in both directions, its mean over time, a dense layer: flax/examples/sst2 in short."""

    cell: Any
    width: int = 128
    vocabulary: int = 10_000

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(self.vocabulary, self.width)(ids)
        there, back = (nn.RNN(self.cell(self.width), name=name) for name in ("there", "back"))
        return nn.Dense(2)(jnp.mean(jnp.asarray(nn.Bidirectional(there, back)(x)), 1))


class RecurrentLanguageModel(nn.Module):
    """Embedding, two LSTMs, logits at every place."""

    vocabulary: int = 1000

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(self.vocabulary, 200)(ids)
        for _ in range(2):
            x = jnp.asarray(nn.RNN(nn.OptimizedLSTMCell(200))(x))
        return nn.Dense(self.vocabulary)(x)


class ActorCritic(nn.Module):
    """flax/examples/ppo: three convolutions over frames [84, 84, 4], 512, the logits of actions and a value side by side."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features, window, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(features, (window, window), (stride, stride), padding="VALID")(x))
        return nn.Dense(7)(nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1))))


class GraphConvolution(nn.Module):
    """flax/examples/ogbg_molpcba in short: two rounds of messages along edges, summed at their receivers."""

    @nn.compact
    def __call__(self, nodes: Any, senders: Any, receivers: Any) -> Any:
        x = nn.Dense(64)(nodes)
        for _ in range(2):
            messages = nn.relu(nn.Dense(64)(x[senders]))
            x = nn.LayerNorm()(x + jax.ops.segment_sum(messages, receivers, x.shape[0]))
        return nn.Dense(10)(x)


class UNet(nn.Module):
    """Two levels down, two up with skips, group norm: images [B, 32, 32, 3] to images."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        skips = []
        for features in (32, 64):
            x = self._block(x, features)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = self._block(x, 128)
        for features, skip in zip((64, 32), reversed(skips), strict=True):
            x = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
            x = self._block(jnp.concatenate([x, skip], -1), features)
        return nn.Conv(3, (1, 1))(x)

    @nn.nowrap
    def _block(self, x: Any, features: int) -> Any:
        return nn.silu(nn.GroupNorm(8)(nn.Conv(features, (3, 3))(x)))


class Autoencoder(nn.Module):
    """Convolutions of stride 2 down to [4, 4, 64], transposed ones up again: images [B, 32, 32, 3]."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features in (16, 32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), (2, 2))(x))
        for features in (32, 16):
            x = nn.relu(nn.ConvTranspose(features, (3, 3), (2, 2))(x))
        return nn.ConvTranspose(3, (3, 3), (2, 2))(x)


class Mixer(nn.Module):
    """MLP-Mixer: patches of 4x4, four layers that mix places, then channels."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(128, (4, 4), (4, 4))(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, 8, 8, C] -> [B, 64, C]
        for _ in range(4):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(64)(y))).swapaxes(1, 2)
            x = x + nn.Dense(128)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


class VisionTransformer(nn.Module):
    """ViT: patches of 4x4, four layers of four heads."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(128, (4, 4), (4, 4))(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, 8, 8, C] -> [B, 64, C]
        for _ in range(4):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


class SkipGram(nn.Module):
    """word2vec: products of words' vectors with those of a neighbour and of sampled words."""

    @nn.compact
    def __call__(self, words: Any, others: Any) -> Any:
        return jnp.einsum("bd,bkd->bk", nn.Embed(20_000, 128)(words), nn.Embed(20_000, 128)(others))
