"""Documented figures, and PyTorch's, beside ours: `python -m train.parity [NAME]`, of `COMPARISONS`; mnist if none is named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from train import parity_cifar, parity_clm, parity_compile, parity_diffusion, parity_mnist, parity_resnet, parity_unet, parity_yolov5

COMPARISONS: Mapping[str, Callable[[Sequence[str] | None], int]] = {
    "mnist": parity_mnist.main,
    "cifar": parity_cifar.main,
    "resnet50": parity_resnet.main,
    "clm": parity_clm.main,
    "compile": parity_compile.main,
    "unet": parity_unet.main,
    "diffusion": parity_diffusion.main,
    "yolov5": parity_yolov5.main,
}
"""Name -> its command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one comparison; its exit status. Options alone are those of the MNIST logs."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments.pop(0) if named else "mnist"
    if name not in COMPARISONS:
        print(f"error: unknown comparison {name!r}; there are: {', '.join(COMPARISONS)}", file=sys.stderr)
        return 2
    return COMPARISONS[name](arguments)


if __name__ == "__main__":
    sys.exit(main())
