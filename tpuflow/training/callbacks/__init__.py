"""What a user may do while a training runs."""
