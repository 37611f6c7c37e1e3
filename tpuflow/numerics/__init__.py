"""What a training step does to its numbers, operation by operation, measured on the device."""
