"""What pyproject.toml cannot say: the folder `models/` is the package `tpuflow.examples.models` wherever tpuflow is installed."""

from setuptools import find_packages, setup

MODELS = "tpuflow.examples.models"

setup(packages=[*find_packages(include=["tpuflow", "tpuflow.*"]), MODELS], package_dir={MODELS: "models"})
