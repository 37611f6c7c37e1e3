"""Make the embedded data set: the first images of Fashion-MNIST, small enough to live in the repository.

    python -m train.make_embedded --data-dir FOLDER

Fashion-MNIST is MIT-licensed, copyright 2017 Zalando SE (tpuflow/examples/embedded/LICENSE).
"""

from __future__ import annotations

import argparse
import hashlib
import io

import numpy as np

from tpuflow.examples import data

TRAIN_COUNT, TEST_COUNT = 512, 256


def main() -> None:
    """Write the file that `tpuflow.examples.data.EMBEDDED` names and print its sha256, which belongs into `tpuflow/examples/data.py`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with fashion-mnist/ (default: $TPUFLOW_DATA, the user's cache, a download)")
    whole = data.load("fashion-mnist", parser.parse_args().data_dir, embedded=False)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **_first("train", whole.train, TRAIN_COUNT), **_first("test", whole.test, TEST_COUNT))
    data.EMBEDDED.parent.mkdir(exist_ok=True)
    data.EMBEDDED.write_bytes(content.getvalue())
    print(f"{data.EMBEDDED}: {len(content.getvalue())} bytes, sha256 {hashlib.sha256(content.getvalue()).hexdigest()}")


def _first(part: str, arrays: tuple[np.ndarray, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The first `count` records as the bytes of the published files: x/255*255 rounds back to the pixel exactly."""
    images, labels = arrays
    pixels = np.rint(images[:count] * np.float32(255)).astype(np.uint8)
    return {f"{part}_images": pixels, f"{part}_labels": labels[:count].astype(np.uint8)}


if __name__ == "__main__":
    main()
