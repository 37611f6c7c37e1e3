"""A pipeline as a training begins with it: its UNet, or low-rank matrices beside it, is trained, and everything else is carried along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import tpuflow
from tpuflow.amp.policy import cast_floats
from tpuflow.training.checkpoints import orbax_files
from train.diffusion import lora
from train.diffusion.folders import PARTS, Pipeline, save_part

ENCODING = ("encoder", "quant_conv")
"""The parts of the VAE that make latents."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """A UNet in training (`train.trainer.running.Start`) with the frozen models that it needs.

    lora_rank: None trains the UNet itself; else low-rank matrices of that rank beside its projections of attention. dtype: the type of what
    is frozen: VAE, text encoder and, with matrices, the UNet. seed: of new matrices. gradient_checkpointing: inner values are computed
    again in the backward pass.
    """

    pipeline: Pipeline
    dtype: Any = jnp.float32
    lora_rank: int | None = None
    gradient_checkpointing: bool = False
    seed: int = 0

    @property
    def unet(self) -> Any:
        """The Flax module that is trained."""
        config = replace(self.pipeline.configs["unet"], gradient_checkpointing=self.gradient_checkpointing, lora_rank=self.lora_rank)
        return PARTS["unet"].model(config)

    @property
    def model(self) -> tpuflow.Model:
        """The UNet as functions of what is trained and of what is carried."""

        def init(key: jax.Array, inputs: Any) -> tuple[Any, Any]:
            configs, drawn = self.pipeline.configs, self._drawn(key)
            shapes = {name: PARTS[name].variables_like(configs[name])["params"] for name in ("vae", "text_encoder")}
            trained, base = lora.parted(drawn) if self.lora_rank else (drawn, None)
            return trained, self._frozen(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), base)

        def apply(params: Any, carried: Any, inputs: Any, rngs: Any, wanted: tuple[str, ...] = ()) -> tuple[Any, Any, Any]:
            whole = lora.joined(params, carried["unet"]) if self.lora_rank else params
            return self.unet.apply({"params": whole}, *inputs[0], **inputs[1]), carried, {}

        return tpuflow.Model(type(self.unet).__name__, init, apply, apply)

    @property
    def variables(self) -> dict[str, Any]:
        """What training begins with: the pipeline's weights, and new matrices."""
        given = {name: self.pipeline.variables[name]["params"] for name in PARTS}
        trained, base = (self._new_matrices(), given["unet"]) if self.lora_rank else (given["unet"], None)
        return {"params": trained, **self._frozen(given, base)}

    def save_checkpoint(self, checkpoint: Path, folder: Path) -> None:
        """Write what is trained, as it is in a checkpoint: unet/ and, if there is one, its average, unet_ema/; or the matrices."""
        arrays = orbax_files().read(checkpoint).arrays
        self._save(arrays["params"], "unet", folder)
        if arrays.get("ema") is not None and not self.lora_rank:
            self._save(arrays["ema"]["params"], "unet_ema", folder)

    def save_result(self, result: Any, folder: Path) -> None:
        """Write the pipeline with what was trained, or its average if there is one; or the matrices."""
        trained = result.params if result.ema is None else result.ema
        if self.lora_rank:
            lora.save(folder, _on_host(trained))
        else:
            self.with_trained(trained).save(folder)

    def with_trained(self, params: Any) -> Pipeline:
        """The pipeline with what was trained, without matrices of its own."""
        params = _on_host(params)
        if self.lora_rank:
            params = lora.fused(self.pipeline.variables["unet"]["params"], params)
        return self.pipeline.with_variables(unet={"params": params})

    def _save(self, params: Any, name: str, folder: Path) -> None:
        if self.lora_rank:
            lora.save(folder, _on_host(params))
            return
        (folder / name).mkdir()
        save_part("unet", self.pipeline.configs["unet"], {"params": _on_host(params)}, folder / name)

    def _frozen(self, given: Mapping[str, Any], base: Any) -> dict[str, Any]:
        vae = {name: given["vae"][name] for name in ENCODING}
        kept = {"vae": vae, "text_encoder": given["text_encoder"], **({} if base is None else {"unet": base})}
        return cast_floats(kept, self.dtype)

    def _new_matrices(self) -> Any:
        """Matrices whose products are zero, drawn from the seed; XLA leaves out what else the module would draw."""
        return jax.jit(lambda key: lora.parted(self._drawn(key))[0])(jax.random.key(self.seed))

    def _drawn(self, key: jax.Array) -> Any:
        """New parameters of the UNet and its matrices."""
        inputs = PARTS["unet"].inputs(self.pipeline.configs["unet"])
        return self.unet.init(key, *(jnp.zeros(one.shape, one.dtype) for one in inputs))["params"]


def _on_host(tree: Any) -> Any:
    """Arrays as NumPy's, floats in fp32."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)
