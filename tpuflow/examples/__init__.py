"""What the first steps need: the example networks, the data sets of the small images, initial weights.

`tpuflow.examples.models` is the folder `models/` of the repository. A wheel holds it here; in a checkout it is found where it lies.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
if not (_HERE / "models").is_dir():
    __path__.append(str(_HERE.parents[1]))
