"""Language models beside transformers' own with the same random weights: what the tests of both hand each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax import numpy as jnp

from models import bert, gpt2, llama, mixtral
from models.configs import JsonConfig
from tpuflow.importers import flax_params

LENGTH = 16
Batch = dict[str, np.ndarray]


def next_token_loss(outputs: jax.Array, batch: Batch) -> jax.Array:
    """The mean cross-entropy of each next token, as transformers' models compute it of `labels`; -100 counts for nothing."""
    return masked_mean(outputs[:, :-1], batch["labels"][:, 1:])


def masked_mean(logits: jax.Array, labels: np.ndarray) -> jax.Array:
    """The mean cross-entropy of logits [..., C] and labels [...], of which those that are -100 count for nothing."""
    counted = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, labels, 0))
    return jnp.where(counted, losses, 0).sum() / counted.sum()


def tokens_and_mask(config: JsonConfig, rng: np.random.Generator) -> Batch:
    """Four sequences, of which two are padded on the right; padding is no label."""
    input_ids = rng.integers(0, config.vocab_size, (4, LENGTH)).astype(np.int32)
    attention_mask = np.ones_like(input_ids)
    attention_mask[1, -5:] = attention_mask[3, -2:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": np.where(attention_mask, input_ids, -100)}


def pretraining_loss(outputs: tuple[jax.Array, jax.Array], batch: Batch) -> jax.Array:
    """BERT's: of the masked words, plus of the next sentence."""
    return masked_mean(outputs[0], batch["labels"]) + masked_mean(outputs[1], batch["next_sentence_label"])


def sentences(config: bert.Config, rng: np.random.Generator) -> Batch:
    """Four pairs of sentences, of which two are padded; a third of the words are asked for."""
    batch = tokens_and_mask(config, rng)
    asked = batch["attention_mask"] * (rng.random((4, LENGTH)) < 0.3)
    return {
        **batch,
        "labels": np.where(asked, rng.integers(0, config.vocab_size, (4, LENGTH)), -100),
        "token_type_ids": (np.arange(LENGTH) >= 7).astype(np.int32) * np.ones((4, 1), np.int32),
        "next_sentence_label": np.array([0, 1, 1, 0], np.int32),
    }


def experts_apart(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mixtral's state dict as in files: transformers 5 keeps all experts of a layer in one tensor, [E, gate and up, D] and [E, D, F]."""
    found: dict[str, np.ndarray] = {}
    for name, array in state.items():
        layer, _, tensor = name.partition(".mlp.")
        moe = f"{layer}.block_sparse_moe"
        if tensor == "experts.gate_up_proj":
            for kind, half in zip(("w1", "w3"), np.split(array, 2, axis=1), strict=True):
                found |= {f"{moe}.experts.{number}.{kind}.weight": one for number, one in enumerate(half)}
        elif tensor == "experts.down_proj":
            found |= {f"{moe}.experts.{number}.w2.weight": one for number, one in enumerate(array)}
        else:
            found[f"{moe}.{tensor}" if tensor else name] = array
    return found


def unchanged(state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Most state dicts are in memory as in files."""
    return state


@dataclass(frozen=True)
class Pair:
    """A model of models/ in a small configuration, and what transformers calls it.

    inputs: name in the batch and in transformers' call -> name in our call. loss: (our outputs, batch) -> scalar. vanishing: ends of the
    paths of parameters whose gradient is 0 but for rounding, with those of ones like them. drifting: ends of the paths of parameters of
    which some elements' gradients are 0 but for rounding, of which AdamW makes steps like any other.
    """

    module: ModuleType
    model: type[nn.Module]
    config: Any
    theirs: str
    inputs: Mapping[str, str]
    loss: Callable[[Any, Batch], jax.Array] = next_token_loss
    batch: Callable[[Any, np.random.Generator], Batch] = tokens_and_mask
    vanishing: tuple[tuple[str, str], ...] = ()
    drifting: tuple[str, ...] = ()
    as_in_files: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = unchanged

    def made(self) -> Any:
        """Our model."""
        return self.model(self.config)

    def twin(self, transformers: ModuleType, torch: ModuleType, *, vectors: bool = True) -> Any:
        """transformers' model from our configuration's `to_json`; every parameter random, since zeros and ones would hide mistakes.

        Without `vectors` only matrices are, and far apart: the tokens that it generates vary.
        """
        torch.manual_seed(0)
        network = getattr(transformers, self.theirs)(transformers.AutoConfig.for_model(**self.config.to_json()))
        with torch.no_grad():
            for parameter in network.parameters():
                if vectors:
                    parameter.normal_(0.05, 0.2)
                elif parameter.ndim > 1:
                    parameter.normal_(0.0, 1.0)
        return network.eval()

    def like(self) -> Any:
        """The shapes of our variables."""
        model, batch = self.made(), self.batch(self.config, np.random.default_rng(0))
        return jax.eval_shape(lambda: model.init(jax.random.key(0), **self.call(batch)))

    def variables(self, state: Mapping[str, np.ndarray]) -> Any:
        """Our variables from tensors under transformers' names."""
        return flax_params(self.as_in_files(state), {"params": self.like()["params"]}, self.module.torch_layers(self.config))

    def call(self, batch: Batch) -> dict[str, Any]:
        """What our model is called with."""
        return {ours: batch[theirs] for theirs, ours in self.inputs.items()}

    def loss_of(self, params: Any, batch: Batch) -> jax.Array:
        """Our loss, with what the model sows."""
        outputs, sown = self.made().apply({"params": params}, **self.call(batch), mutable=["losses"])
        return sum(jax.tree.leaves(sown), start=self.loss(outputs, batch))


def state_of(network: Any) -> dict[str, np.ndarray]:
    """A state dict of arrays."""
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


def to_torch(torch: ModuleType, batch: Batch) -> dict[str, Any]:
    """A batch for transformers' models, which take integers of 64 bits."""
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in batch.items()}


CAUSAL = {"input_ids": "tokens", "attention_mask": "attention_mask"}
WITH_TYPES = {"input_ids": "input_ids", "attention_mask": "attention_mask", "token_type_ids": "token_type_ids"}
GPT2 = Pair(gpt2, gpt2.GPT2, gpt2.TINY, "GPT2LMHeadModel", CAUSAL, drifting=("c_attn/bias",))
BERT = Pair(
    bert,
    bert.BertForPreTraining,
    bert.TINY,
    "BertForPreTraining",
    WITH_TYPES,
    pretraining_loss,
    sentences,
    (("key/bias", "query/bias"),),
    ("key/bias",),
)
LLAMA = Pair(llama, llama.Llama, llama.TINY, "LlamaForCausalLM", CAUSAL)
MIXTRAL = Pair(mixtral, mixtral.Mixtral, mixtral.TINY, "MixtralForCausalLM", CAUSAL, as_in_files=experts_apart)

PAIRS: Mapping[str, Pair] = {
    "gpt2": GPT2,
    "gpt2-untied-scan": dataclasses.replace(
        GPT2, config=dataclasses.replace(gpt2.TINY, tie_word_embeddings=False, n_inner=48, scan=True, remat=True)
    ),
    "bert": BERT,
    "bert-scan": dataclasses.replace(BERT, config=dataclasses.replace(bert.TINY, hidden_act="gelu_new", scan=True)),
    "llama": LLAMA,
    "llama-tied-scan": dataclasses.replace(
        LLAMA, config=dataclasses.replace(llama.TINY, tie_word_embeddings=True, attention_bias=True, head_dim=6, pad_token_id=3, scan=True)
    ),
    "mixtral": MIXTRAL,
    "mixtral-scan": dataclasses.replace(MIXTRAL, config=dataclasses.replace(mixtral.TINY, scan=True)),
}
"""Name -> a model and its original."""
