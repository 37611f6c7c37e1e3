"""Whether a step fits, what its numbers do, how long it takes and what would help, on one page."""
