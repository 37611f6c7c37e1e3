"""What users type: train, jit, and what they hand back."""
