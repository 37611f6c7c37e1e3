"""The options, and that they make sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tpuflow.errors import ConfigError
from train.options import DeviceOptions, option
from train.ranges import check_least, underlined
from train.trainer.schedules import SCHEDULERS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions(DeviceOptions):
    """Options of transformers' TrainingArguments, under their names and with their defaults, and those of the device."""

    output_dir: Path | None = option(None, "output", "folder of the trained model, its results and checkpoints", Path, metavar="FOLDER")
    overwrite_output_dir: bool = option(False, "output", "begin anew where a training lies", flag="--overwrite_output_dir")
    resume_from_checkpoint: str | None = option(
        None, "output", "go on from a checkpoint: latest, or a folder checkpoint-N in --output_dir", metavar="FOLDER"
    )
    save_steps: int = option(500, "output", "save after every N updates, and at the end", int, metavar="N")
    save_total_limit: int | None = option(None, "output", "newest checkpoints to keep; else all", int, metavar="N")
    logging_steps: int = option(500, "output", "log after every N updates", int, metavar="N")
    do_train: bool = option(False, "training", "train", flag="--do_train")
    do_eval: bool = option(False, "training", "evaluate at the end", flag="--do_eval")
    eval_steps: int | None = option(None, "training", "evaluate after every N updates too", int, metavar="N")
    per_device_train_batch_size: int = option(8, "training", "samples a step", int)
    per_device_eval_batch_size: int = option(8, "training", "samples a step of an evaluation", int)
    gradient_accumulation_steps: int = option(1, "training", "steps for one update", int)
    learning_rate: float = option(5e-5, "training", "the highest of the schedule", float)
    weight_decay: float = option(0.0, "training", "of AdamW, on all but biases and norms", float)
    adam_beta1: float = option(0.9, "training", "of AdamW", float)
    adam_beta2: float = option(0.999, "training", "of AdamW", float)
    adam_epsilon: float = option(1e-8, "training", "of AdamW", float)
    max_grad_norm: float = option(1.0, "training", "scale gradients down to this global norm; 0: do not", float)
    num_train_epochs: float = option(3.0, "training", "passes over the data", float)
    max_steps: int = option(-1, "training", "updates in all, whatever --num_train_epochs says", int)
    lr_scheduler_type: str = option(
        "linear",
        "training",
        "how the rate falls after the warm-up",
        choices=tuple(SCHEDULERS),
    )
    warmup_steps: int = option(0, "training", "updates of rising rate", int)
    seed: int = option(42, "training", "of new weights, of the data's order, of dropout", int)
    policy: str | None = option(None, "device", "precision, such as fp32, mixed, mixed_bf16, fp16, O3 [fp32]")
    fp16: bool = option(False, "device", "the same as --policy mixed", flag="--fp16")
    bf16: bool = option(False, "device", "the same as --policy mixed_bf16", flag="--bf16")
    sink_size: int = option(-1, "device", "steps a host round trip: -1 as many as there are until the next log line, 0 each by itself", int)
    json: Path | None = option(None, "output", "write the whole result there", Path, metavar="FILE")
    plot: Path | None = option(None, "output", "draw the loss there: .png, .svg or .pdf", Path, metavar="FILE")
    progress: bool = option(True, "output", "no progress bar", flag="--no-progress")

    @property
    def precision(self) -> str:
        """The policy's name."""
        return self.policy or ("mixed" if self.fp16 else "mixed_bf16" if self.bf16 else "fp32")

    def check(self) -> None:
        """That numbers are in their ranges and options agree.

        Raises:
          ConfigError: not so.
        """
        check_least(self, LEAST, underlined)
        if (self.policy is not None) + self.fp16 + self.bf16 > 1:
            raise ConfigError("--policy, --fp16 and --bf16 each say which precision; give one of them.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ConfigError(f"--max_steps: expected 1 or more, or -1 for as many as --num_train_epochs makes, got {self.max_steps}.")
        if self.num_train_epochs <= 0:
            raise ConfigError(f"--num_train_epochs: expected more than 0, got {self.num_train_epochs}.")
        if not (self.do_train or self.do_eval):
            raise ConfigError("nothing to do: give --do_train, --do_eval or both.")
        if self.output_dir is None and (self.do_train or self.resume_from_checkpoint):
            raise ConfigError("--output_dir: give a folder for the trained model and its checkpoints.")


LEAST = dict.fromkeys(
    ("save_steps", "save_total_limit", "logging_steps", "eval_steps", "per_device_train_batch_size", "per_device_eval_batch_size",
     "gradient_accumulation_steps"), 1,
) | dict.fromkeys(
    ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "seed"), 0
) | {"sink_size": -1}  # fmt: skip
