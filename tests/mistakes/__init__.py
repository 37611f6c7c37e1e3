"""What new users get wrong, as a table: each mistake in a few lines, and what its error must say.

`python -m tests.mistakes > docs/errors.md` writes the whole text of every error.
"""

from tests.mistakes import command_line, data, detection, files, models, options, stages
from tests.mistakes.table import MISTAKES, Mistake

CHAPTERS = (options, models, data, files, stages, command_line, detection)

__all__ = ["CHAPTERS", "MISTAKES", "Mistake"]
