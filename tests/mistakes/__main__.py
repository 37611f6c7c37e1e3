"""`python -m tests.mistakes > docs/errors.md`: every mistake as code, and its error."""

from __future__ import annotations

import sys

from tests.mistakes.document import document

sys.stdout.write(document())
