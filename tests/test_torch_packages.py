"""Packages of PyTorch models for comparisons."""

from __future__ import annotations

import pytest

from tpuflow.errors import ConfigError
from train.torch_packages import import_package


@pytest.mark.torch
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(torch):
    with pytest.raises(ConfigError, match=r"needs no_such_package, which is not installed: pip install -e '\.\[torch,torch-models\]'"):
        import_package("no_such_package")
