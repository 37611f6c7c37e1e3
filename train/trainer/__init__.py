"""Training as transformers' example scripts do it: their options, schedules, optimizer, log lines and output folder."""
