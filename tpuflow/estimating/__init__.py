"""What a step would cost, from shapes alone; and the constants of the timing model, fitted to measured times."""
