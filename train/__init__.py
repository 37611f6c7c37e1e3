"""Recipes that train the example networks on the simulated device, used from the repository: `python -m train mnist`."""
