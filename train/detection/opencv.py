"""OpenCV, which reads, scales and warps pictures: asked for when it is first needed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from tpuflow.errors import ConfigError


@cache
def opencv() -> Any:
    """The module cv2, on one thread for each caller: the loader has threads of its own, which OpenCV's would fight with.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError as error:
        raise ConfigError(f"object detection reads pictures with OpenCV ({error}): pip install 'tpuflow[detection]'.") from error
    cv2.setNumThreads(0)
    return cv2
