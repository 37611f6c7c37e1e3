"""Which rows of bench/measured_steps.csv can be modelled, and how: the step to compile, the chip, what to say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models import alexnet
from models.bam import BottleneckAttention
from models.bert import NO_DROPOUT, SIZES, BertForPreTraining, Config, pretraining_batch
from models.googlenet import GoogLeNet
from models.lenet import LeNet5
from models.resnet import MINDSPORE, Bottleneck, ResNet, resnet50
from models.squeezenet import SqueezeNet
from models.unet_2d_condition import SIZES as UNETS
from models.unet_2d_condition import UNet2DConditionModel
from models.vgg import VGG16
from models.wide_resnet import WideResNet
from models.yolov5 import yolov5
from tpuflow.amp import Policy, get_policy
from tpuflow.chips import CHIPS, Chip
from tpuflow.compiler import compile_function
from tpuflow.estimating.estimating import training_program
from tpuflow.isa.program import Program
from tpuflow.training.config import StepConfig
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.optimizer import make_optimizer
from train.detection.schedules import Plan
from train.diffusion.steps import ADAMW, FIRST, SECOND, step_of
from train.yolov5 import EMA

SUNK = 1000  # steps a round trip where the source says that the data are sunk, or loops on the device


def _clipped(grad: jax.Array) -> jax.Array:
    """A gradient whose norm is at most 1."""
    return grad / jnp.maximum(1.0, optax.global_norm(grad))


def _matrices(parameters: Any) -> Any:
    """MLPerf's LARS adapts and decays kernels only, not biases and the vectors of batch normalisation."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, parameters)


BASE, LARGE = SIZES["bert-base-uncased"], SIZES["bert-large-uncased"]
MOMENTUM, LAMB = optax.sgd(0.1, 0.9), optax.lamb(1e-3)
CLIPPED_LAMB = optax.chain(optax.clip_by_global_norm(1.0), LAMB)
"""BERT's in MLPerf's programs (0.7, optimization.py)."""
CLIPPED_EACH = optax.chain(optax.stateless(lambda grads, _: jax.tree.map(_clipped, grads)), LAMB)
"""BERT's in MindSpore's model zoo (bert_for_pre_training.py): every gradient by its own norm."""
LARS = optax.lars(0.1, 1e-4, weight_decay_mask=_matrices, trust_ratio_mask=_matrices)
BOXES_DRAWN = 128
"""Room for boxes in a picture of YOLOv5's, a mosaic of four."""
YOLO_SGD = make_optimizer("SGD", Plan(Hyperparameters(), epochs=300, steps_per_epoch=462, batch_size=256))
OPTIMIZERS = {
    "momentum": MOMENTUM, "clipped lamb": CLIPPED_LAMB, "clipped each, lamb": CLIPPED_EACH, "lars": LARS, "adamw": ADAMW, "sgd": YOLO_SGD,
}  # fmt: skip
BF16_SCOPE = Policy("bf16 scope", "float32", "bfloat16", "float32", "float32", "all")
"""MLPerf's ResNet-50 for TPUs: everything within TensorFlow's `bfloat16_scope`, so in bf16 from layer to layer, with parameters and the
arithmetic of batch normalisation in f32."""
LORA_RANK = 128
"""Of the vendor's configurations for text-to-image training."""

GROUP = "group"
"""The mesh axis of the chips that normalise their batches together."""
TOLD_APART = ("config", "channels", "between")
"""Fields of models, neither numbers nor names, that make cases different."""

Make = Callable[[Chip], Program]


@dataclass(frozen=True, slots=True)
class Case:
    """A measured row that can be modelled: what to compile for which chip, and what to say about it; cases with equal keys are one.

    `steps` is how many of them a round trip runs. `config` is a training step's.
    """

    model: str
    chip: Chip
    key: str
    make: Make
    steps: int = 1
    note: str = ""
    config: StepConfig | None = None
    span: int = 1

    def on(self, chips: int) -> Case:
        """The same batch on each of so many chips, if it is a training step: data parallel, compiled for all of them."""
        if self.config is None or chips == 1:
            return self
        config = on_chips(self.config, chips, self.span)
        return replace(self, key=f"{self.key} on {chips}", make=lambda chip: training_program(config, chip)[1], config=config)


def on_chips(config: StepConfig, chips: int, span: int = 1) -> StepConfig:
    """A step of one chip's batch as the data-parallel step of so many, in groups of `span`."""
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((chips * x.shape[0], *x.shape[1:]), x.dtype), config.data)
    mesh = {"data": chips} if span == 1 else {"data": chips // span, GROUP: span}
    return replace(config, data=whole, mesh=mesh, sharding="ddp")


def trained(
    model: str,
    module: Any,
    batch: int,
    chip: Chip,
    policy: str | Policy,
    optimizer: optax.GradientTransformation = MOMENTUM,
    *,
    shape: tuple[int, ...] = (224, 224, 3),
    note: str = "",
) -> Case:
    """The training step of a model of images: [batch, *shape], and their classes."""
    inputs, targets = jax.ShapeDtypeStruct((batch, *shape), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    options = " ".join(
        f"{k}={v}" for k, v in vars(module).items() if isinstance(v, bool | int | str) or (k in TOLD_APART and v is not None)
    )
    size = "x".join(map(str, inputs.shape))
    return case(model, StepConfig(module, (inputs, targets), policy, optimizer), chip, f"{options} {size}", note)


def case(model: str, step: StepConfig, chip: Chip, key: str, note: str) -> Case:
    """A training step on a chip; `key` tells it apart from others of the same kind of model, policy and optimizer."""

    rule = next(name for name, optimizer in OPTIMIZERS.items() if optimizer is step.optimizer)
    whole = f"{type(step.model).__name__} {key} {chip.name} {get_policy(step.policy).name} {rule}"
    return Case(model, chip, whole, lambda chip: training_program(step, chip)[1], SUNK, note, step)


def masked_words(config: Config, length: int, masked: int, batch: int, chip: Chip, policy: str, note: str = "") -> Case:
    """BERT's pretraining step with LAMB and gradients clipped as the makers do, and with the dropout that its configuration has. Their GELU
    is the one by tanh."""
    name = "BERT-base" if config.hidden_size == BASE.hidden_size else "BERT-large"
    module = BertForPreTraining(replace(config, hidden_act="gelu_new"))
    said = "; ".join(filter(None, ("" if config.hidden_dropout_prob else "without dropout", note)))
    optimizer = CLIPPED_EACH if chip.family == "ascend" else CLIPPED_LAMB
    step = StepConfig(module, pretraining_batch(batch, length, masked), policy, optimizer, pretraining_loss)
    key = f"config={module.config} masked={masked} {batch}x{length}"
    return case(name, step, chip, key, said)


def pretraining_loss(outputs: tuple[jax.Array, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
    """BERT's: the cross-entropy of the masked words plus that of the next sentence."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(outputs[0], batch["masked_labels"]).mean() + cross_entropy(outputs[1], batch["next_sentence_label"]).mean()


@dataclass(frozen=True, slots=True)
class TextToImage:
    """A version of Stable Diffusion: its UNet in `UNETS`, the side of its pictures in pixels, and what it predicts."""

    version: str
    unet: str
    side: int
    predicts: str


SD_15, SD_20 = TextToImage("1.5", FIRST, 512, "epsilon"), TextToImage("2", SECOND, 512, "epsilon")
SD_21_V = TextToImage("2.1-v", SECOND, 768, "v_prediction")
"""As MindONE trains it, scores of attention in the compute type (`configs/v2-vpred-train.yaml`)."""


def diffusion(model: TextToImage, batch: int, chip: Chip, *, lora_rank: int | None = None) -> Case:
    """The training step of a text-to-image pipeline with AdamW: all of the UNet, or matrices beside its attention.

    VAE and text encoder are in it. The makers' dropout of 0.1 is not.
    """
    step = step_of(model.unet, batch, model.side, prediction_type=model.predicts, lora_rank=lora_rank)
    key = f"{model.unet} lora_rank={lora_rank} {batch}x{model.side}"
    matrices = f"; rank {lora_rank}" if lora_rank else ""
    name = f"SD {model.version}{' LoRA' if lora_rank else ''}"
    return case(name, step, chip, key, f"without dropout{matrices}")


def denoising(pictures: int, chip: Chip) -> Case:
    """A step of sampling with guidance at 512x512: Stable Diffusion 1.x's UNet for twice as many latents."""
    config = UNETS[FIRST]
    shapes = ((64, 64, config.in_channels), (), (77, config.cross_attention_dim))
    types = (jnp.float16, jnp.int32, jnp.float16)
    inputs = tuple(jax.ShapeDtypeStruct((2 * pictures, *shape), dtype) for shape, dtype in zip(shapes, types, strict=True))
    return inference("SD 1.5", UNet2DConditionModel(config), inputs, chip, jnp.float16, "UNet with and without the prompt")


def boxes(name: str, batch: int, side: int, chip: Chip) -> Case:
    """The training step of a YOLOv5 at [batch, side, side, 3] with 80 classes, its average included; pictures arrive as bytes."""
    module = yolov5(name, 80)
    room = (batch, BOXES_DRAWN)
    data = {
        "images": jax.ShapeDtypeStruct((batch, side, side, 3), jnp.uint8),
        "boxes": jax.ShapeDtypeStruct((*room, 4), jnp.float32),
        "classes": jax.ShapeDtypeStruct(room, jnp.int32),
        "valid": jax.ShapeDtypeStruct(room, jnp.bool_),
    }
    loss = detection_loss(DetectionLoss(module.config, Hyperparameters(), side))
    step = StepConfig(module, data, "O3", YOLO_SGD, loss_fn=loss, inputs=pixels, ema=EMA)
    return case(f"{name} at {side}", step, chip, f"{name} {batch}x{side}", "mosaics are made on the host")


def product(size: tuple[int, int, int], chip: Chip, note: str) -> Case:
    """A bf16 product [rows, depth] x [depth, columns], timed on the device: without the host's round trip."""
    rows, depth, columns = size
    shapes = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16), jax.ShapeDtypeStruct((depth, columns), jnp.bfloat16)

    def make(chip: Chip) -> Program:
        return compile_function(lambda a, b: a @ b, shapes, name="matmul", chip=chip)

    return Case("matmul", replace(chip, launch_seconds=0.0), f"matmul {rows} {depth} {columns} {chip.name}", make, note=note)


def inference(model: str, module: Any, inputs: tuple[jax.ShapeDtypeStruct, ...], chip: Chip, dtype: Any, note: str) -> Case:
    """A model's forward pass, everything in one type; whole numbers stay as they are."""
    drawn = [jax.ShapeDtypeStruct(x.shape, x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32) for x in inputs]

    def make(chip: Chip) -> Program:
        variables = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *drawn)
        variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), variables)
        return compile_function(lambda v, *xs: module.apply(v, *xs), (variables, *inputs), name=model, chip=chip)

    return Case(f"{model} forward", chip, f"{model} forward {inputs[0].shape[0]} {chip.name}", make, note=note)


def cases() -> Mapping[str, Case]:
    """Row id -> how to model it."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float16)
    resnet = inference("ResNet-50", resnet50(1000), (image,), CHIPS["bm1684x"], jnp.float16, "no fit for this family")
    return {**_ascend(), **_diffusion(), **_boxes(), **_tpu(), "M493": resnet}


def _ascend() -> dict[str, Case]:
    chip = CHIPS["ascend910"]
    rates = {f: 1.1 * getattr(chip, f) for f in ("clock_hz", "core_hbm_bytes_per_second", "core_cache_bytes_per_second")}  # bytes a cycle
    faster = replace(chip, name="ascend910-proa", **rates)
    cifar, imagenet = {"shape": (227, 227, 3), "note": "CIFAR-10"}, {"shape": (227, 227, 3), "note": "ImageNet"}

    base, large = replace(BASE, vocab_size=21128), replace(LARGE, vocab_size=21128)

    def resnet(batch: int, chip: Chip = chip, optimizer: optax.GradientTransformation = MOMENTUM, note: str = "") -> Case:
        return trained("ResNet-50", resnet50(1000), batch, chip, "O2", optimizer, note=note)

    return {
        "M009": trained("LeNet-5", LeNet5(), 32, chip, "O2", shape=(32, 32, 1)),
        "M010": trained("AlexNet", alexnet.AlexNet(10, alexnet.MINDSPORE, 0.35), 32, chip, "O2", **cifar),
        "M013": trained("VGG-16", VGG16(10), 64, chip, "O2"),
        "M015": trained("VGG-16", VGG16(1000), 32, chip, "O2"),
        "M024": trained("SqueezeNet", SqueezeNet(10), 32, chip, "O2", **cifar),
        "M026": trained("SqueezeNet", SqueezeNet(1000), 32, chip, "O2", **imagenet),
        "M027": trained("SqueezeNet", SqueezeNet(10, residual=True), 32, chip, "O2", **cifar),
        "M029": trained("SqueezeNet", SqueezeNet(1000, residual=True), 32, chip, "O2", **imagenet),
        "M031": trained("WideResNet-40-10", WideResNet(), 32, chip, "O2", shape=(32, 32, 3)),
        "M033": trained("ResNet-50 + BAM", ResNet(Bottleneck, (3, 4, 6, 3), 1000, between=BottleneckAttention), 128, chip, "O3"),
        "M044": trained("GoogLeNet", GoogLeNet(10), 128, chip, "O2"),
        "M045": trained("GoogLeNet", GoogLeNet(1000), 256, chip, "O2"),
        "M086": inference(
            "BERT-base",
            BertForPreTraining(replace(BASE, **NO_DROPOUT)),
            (jax.ShapeDtypeStruct((32, 128), jnp.int32),),
            chip,
            jnp.float16,
            "the source's loop is bound by its host",
        ),
        "M065": masked_words(base, 128, 20, 256, chip, "O2"),
        "M087": resnet(256),
        "M089": resnet(256),
        "M091": resnet(32),
        "M094": masked_words(large, 128, 20, 96, chip, "O2"),
        "M096": masked_words(large, 128, 20, 96, chip, "O2"),
        "M303": resnet(64, optimizer=LARS),
        "M307": resnet(32, faster, LARS, "1.1 GHz"),
        "S001": trained("ResNet-50", resnet50(10), 32, chip, "O3"),
    }


def _ascend910b() -> Chip:
    """The successor, whose vector units are cores of their own, two beside each cube: counted as vector units of its cores.

    20 cubes at 1.85 GHz, 135 GiB/s each, UB of 192 KB beside each vector core, L1 512 KB, L0C 128 KB, L2 192 MB, from the cost models of
    CANN's open libraries (pto-isa, catlass); 64 GB at 1.6 TB/s; eight chips joined each to each at 28 GB/s and link, assumed.
    """
    clock = 1.85e9
    return replace(
        CHIPS["ascend910"], name="ascend910b", cores=20, clock_hz=clock, vector_units=2, vmem_bytes=(512 + 2 * 192) * 2**10,
        acc_bytes=128 * 2**10, hbm_bytes=64 * 2**30, hbm_parameter_bytes=0, hbm_feature_bytes=0, hbm_bytes_per_second=1.6e12,
        core_hbm_bytes_per_second=135 * 2**30, cache_bytes=192 * 2**20, core_cache_bytes_per_second=110 * clock, link_chips=8,
        link_bytes_per_second=7 * 28e9, power_watts=0.0,
    )  # fmt: skip


def _diffusion() -> dict[str, Case]:
    chip, later = CHIPS["ascend910"], _ascend910b()
    first, matrices = diffusion(SD_15, 3, chip), diffusion(SD_15, 4, chip, lora_rank=LORA_RANK)
    second, second_matrices = diffusion(SD_20, 3, chip), diffusion(SD_20, 4, chip, lora_rank=LORA_RANK)
    larger, larger_matrices = diffusion(SD_21_V, 3, chip), diffusion(SD_21_V, 4, chip, lora_rank=LORA_RANK)
    return {
        "M223": first,
        "M224": first,
        "M225": matrices,
        "M226": matrices,
        "M228": second,
        "M229": second,
        "M230": second_matrices,
        "M231": second_matrices,
        "M232": larger,
        "M233": larger,
        "M234": larger_matrices,
        "M235": larger_matrices,
        "M236": diffusion(SD_15, 3, later),
        "M238": diffusion(SD_15, 4, later, lora_rank=LORA_RANK),
        "M241": diffusion(SD_20, 3, later),
        "M242": diffusion(SD_20, 4, later, lora_rank=LORA_RANK),
        "M244": diffusion(SD_21_V, 3, later),
        "M245": denoising(4, chip),
        "M246": denoising(4, later),
    }


def _boxes() -> dict[str, Case]:
    chip, later = CHIPS["ascend910"], _ascend910b()
    return {
        "M195": boxes("yolov5m6", 32, 1280, later),
        "M498": boxes("yolov5n", 32, 640, chip),
        "M499": boxes("yolov5s", 32, 640, chip),
        "M500": boxes("yolov5m", 32, 640, chip),
        "M501": boxes("yolov5l", 32, 640, chip),
        "M502": boxes("yolov5x", 16, 640, chip),
        "M503": boxes("yolov5n", 32, 640, later),
        "M504": boxes("yolov5s", 32, 640, later),
    }


def _tpu() -> dict[str, Case]:
    v2, v3, v4, v7x = (CHIPS[f"tpu-v{n}"] for n in (2, 3, 4, "7x"))
    device = replace(v7x, cores=1, hbm_bytes=v7x.hbm_bytes // 2, hbm_bytes_per_second=v7x.hbm_bytes_per_second / 2)

    def resnet(batch: int, chip: Chip, optimizer: optax.GradientTransformation = LARS, span: int = 1) -> Case:
        model = resnet50(1000, MINDSPORE if span == 1 else replace(MINDSPORE, norm_axis=GROUP))
        case = trained("ResNet-50", model, batch, chip, BF16_SCOPE, optimizer)
        return replace(case, key=f"{case.key} normalised over {span}", span=span) if span > 1 else case

    large = replace(LARGE, **NO_DROPOUT)  # TPUs draw random bits in hardware; threefry in the vector unit takes longer
    roomy, kept = replace(v4, hbm_bytes=2 * v4.hbm_bytes), "all activations kept, in twice the chip's memory"
    half = "one of the chip's two devices; device time"
    return {
        "M256": resnet(256, v2, MOMENTUM),
        "M258": resnet(256, v3, MOMENTUM),
        "M261": resnet(256, v3),
        "M263": resnet(256, v3),
        "M265": resnet(64, v3),
        "M267": resnet(256, v3),
        "M269": resnet(256, v4),
        "M271": resnet(32, v4, span=2),  # `model_bn_span` in the logs: 64 pictures are normalised together
        "M273": resnet(16, v3, span=4),
        "M275": resnet(16, v4, span=4),
        "M277": resnet(16, v4, span=4),
        "L001": resnet(256, v3, MOMENTUM),
        "L002": resnet(64, v3, MOMENTUM),
        "L003": resnet(64, v2, MOMENTUM),
        "L004": resnet(256, v3),
        "L005": resnet(128, v3),
        "L006": resnet(32, v3, span=4),
        "L007": resnet(16, v3, span=4),
        "L008": resnet(128, v4),
        "L009": resnet(128, v4),
        "L010": resnet(16, v4, span=4),
        "L011": resnet(8, v4, span=8),
        "M280": masked_words(large, 512, 76, 48, roomy, "mixed_bf16", kept),
        "M282": masked_words(large, 512, 76, 2, v3, "mixed_bf16"),
        "M284": masked_words(large, 512, 76, 48, roomy, "mixed_bf16", f"{kept}; measured with packed sentences"),
        "M435": product((256, 256, 256), device, half),
        "M436": product((512, 512, 512), device, half),
        "M439": product((4096, 4096, 4096), device, half),
        "M445": product((8192, 8192, 32768), v2, "one chip's share of a 4 x 2 mesh"),
    }
