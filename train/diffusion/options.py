"""The options of text-to-image training, under the names and with the defaults of diffusers' script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpuflow.errors import ConfigError
from train.options import DeviceOptions, option
from train.ranges import check_given, check_least, underlined
from train.trainer.options import TrainerOptions
from train.trainer.schedules import SCHEDULERS

PRECISIONS: Mapping[str, str] = {"no": "fp32", "fp16": "mixed", "bf16": "mixed_bf16"}
"""--mixed_precision -> policy."""

PREDICTIONS = ("epsilon", "v_prediction")
"""What a model can be trained to predict."""


@dataclass(frozen=True, kw_only=True)
class TextToImageOptions(DeviceOptions):
    """What is trained, on which pictures, and how."""

    pretrained_model_name_or_path: str | None = option(
        None, "model and pictures", "a pipeline's folder, as diffusers writes it", metavar="FOLDER"
    )
    train_data_dir: Path | None = option(
        None, "model and pictures", "folder of pictures with metadata.jsonl or metadata.csv", Path, metavar="FOLDER"
    )
    image_column: str = option("image", "model and pictures", "column of the pictures; image stands for file_name", metavar="NAME")
    caption_column: str = option("text", "model and pictures", "column of the captions", metavar="NAME")
    max_train_samples: int | None = option(None, "model and pictures", "use N pictures only, drawn by the seed", int, metavar="N")
    resolution: int = option(512, "model and pictures", "pixels of a side", int)
    center_crop: bool = option(False, "model and pictures", "cut the square out of the middle; else anywhere", flag="--center_crop")
    random_flip: bool = option(False, "model and pictures", "mirror half of the pictures", flag="--random_flip")
    output_dir: Path | None = option(None, "output", "folder of the trained pipeline, its results and checkpoints", Path, metavar="FOLDER")
    overwrite_output_dir: bool = option(False, "output", "begin anew where a training lies", flag="--overwrite_output_dir")
    resume_from_checkpoint: str | None = option(
        None, "output", "go on from a checkpoint: latest, or a folder checkpoint-N in --output_dir", metavar="FOLDER"
    )
    checkpointing_steps: int = option(500, "output", "save after every N updates, and at the end", int, metavar="N")
    checkpoints_total_limit: int | None = option(None, "output", "newest checkpoints to keep; else all", int, metavar="N")
    validation_prompts: list[str] | None = option(None, "output", "draw pictures of these on the way", nargs="+", metavar="TEXT")
    validation_epochs: int = option(5, "output", "draw them after every N passes", int, metavar="N")
    logging_steps: int = option(100, "output", "log after every N updates", int, metavar="N")
    train_batch_size: int = option(16, "training", "pictures a step", int)
    num_train_epochs: int = option(100, "training", "passes over the pictures", int)
    max_train_steps: int | None = option(None, "training", "updates in all, whatever --num_train_epochs says", int, metavar="N")
    gradient_accumulation_steps: int = option(1, "training", "steps for one update", int)
    gradient_checkpointing: bool = option(
        False, "training", "compute inner values again in the backward pass: less memory, more time", flag="--gradient_checkpointing"
    )
    learning_rate: float = option(1e-4, "training", "the highest of the schedule", float)
    scale_lr: bool = option(False, "training", "multiply the rate by the pictures of an update", flag="--scale_lr")
    lr_scheduler: str = option("constant", "training", "how the rate goes after the warm-up", choices=tuple(SCHEDULERS))
    lr_warmup_steps: int = option(500, "training", "updates of rising rate; constant has none", int)
    snr_gamma: float | None = option(
        None, "training", "weigh losses by at most this signal-to-noise ratio; 5 is recommended", float, metavar="GAMMA"
    )
    noise_offset: float = option(0.0, "training", "share of noise that is the same for all pixels", float)
    input_perturbation: float = option(0.0, "training", "share of further noise on the UNet's input; 0.1 is recommended", float)
    prediction_type: str | None = option(None, "training", "what is predicted; else as the pipeline's scheduler says", choices=PREDICTIONS)
    use_ema: bool = option(False, "training", "keep an average of the weights, which is what is saved in the end", flag="--use_ema")
    lora_rank: int | None = option(
        None, "training", "train matrices of this rank beside the projections of attention alone; else the UNet", int, metavar="RANK"
    )
    adam_beta1: float = option(0.9, "training", "of AdamW", float)
    adam_beta2: float = option(0.999, "training", "of AdamW", float)
    adam_weight_decay: float = option(1e-2, "training", "of AdamW, on all weights", float)
    adam_epsilon: float = option(1e-8, "training", "of AdamW", float)
    max_grad_norm: float = option(1.0, "training", "scale gradients down to this global norm; 0: do not", float)
    seed: int = option(0, "training", "of the pictures' order and cuts, of noise, timesteps and latents, of new matrices", int)
    mixed_precision: str = option("no", "device", "16 bits for the UNet's products and for what is frozen", choices=tuple(PRECISIONS))
    policy: str | None = option(None, "device", "precision by the name of a policy, in place of --mixed_precision")
    sink_size: int = option(-1, "device", "steps a host round trip: -1 as many as there are until the next log line, 0 each by itself", int)
    json: Path | None = option(None, "output", "write the whole result there", Path, metavar="FILE")
    plot: Path | None = option(None, "output", "draw the loss there: .png, .svg or .pdf", Path, metavar="FILE")
    progress: bool = option(True, "output", "no progress bar", flag="--no-progress")

    def check(self) -> None:
        """That numbers are in their ranges and options agree.

        Raises:
          ConfigError: not so.
        """
        check_given(self, NEEDED, underlined)
        check_least(self, LEAST, underlined)
        if self.snr_gamma is not None and self.snr_gamma <= 0:
            raise ConfigError(f"--snr_gamma: expected more than 0, got {self.snr_gamma}.")
        if self.policy is not None and self.mixed_precision != "no":
            raise ConfigError("--policy and --mixed_precision each say which precision; give one of them.")
        if self.use_ema and self.lora_rank:
            raise ConfigError("--use_ema averages the weights of a UNet; leave it out with --lora_rank, or train the UNet.")

    @cached_property
    def trainer(self) -> TrainerOptions:
        """The options that all trainings share, under transformers' names."""
        named = {name: getattr(self, name) for name in SHARED}
        per_update = self.train_batch_size * self.gradient_accumulation_steps
        return TrainerOptions(
            **named,
            **self.device,
            do_train=True,
            save_steps=self.checkpointing_steps,
            save_total_limit=self.checkpoints_total_limit,
            per_device_train_batch_size=self.train_batch_size,
            learning_rate=self.learning_rate * (per_update if self.scale_lr else 1),
            weight_decay=self.adam_weight_decay,
            max_steps=self.max_train_steps or -1,
            lr_scheduler_type=self.lr_scheduler,
            warmup_steps=self.lr_warmup_steps,
            policy=self.policy or PRECISIONS[self.mixed_precision],
        )


NEEDED = {
    "pretrained_model_name_or_path": "a pipeline's folder",
    "train_data_dir": "a folder of pictures with captions",
    "output_dir": "a folder for the trained pipeline and its checkpoints",
}
"""Options that have no default -> what is to be given."""

SHARED = (
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "logging_steps", "gradient_accumulation_steps", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs", "seed", "sink_size", "progress",
)  # fmt: skip
"""Options that transformers' trainings have under the same names."""

LEAST = dict.fromkeys(
    ("max_train_samples", "resolution", "checkpointing_steps", "checkpoints_total_limit", "validation_epochs", "logging_steps",
     "train_batch_size", "num_train_epochs", "max_train_steps", "gradient_accumulation_steps", "lora_rank"), 1,
) | dict.fromkeys(
    ("learning_rate", "lr_warmup_steps", "noise_offset", "input_perturbation", "adam_weight_decay", "adam_epsilon",
     "max_grad_norm", "seed"), 0
) | {"sink_size": -1}  # fmt: skip
