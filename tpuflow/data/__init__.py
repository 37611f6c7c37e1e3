"""What trainings feed on: batches of every accepted form, stacked into chunks and walked through."""
