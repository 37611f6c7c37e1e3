"""`python -m tpuflow` is the command line, as `tpuflow` is."""

from __future__ import annotations

import sys

from tpuflow.cli import main

sys.exit(main())
