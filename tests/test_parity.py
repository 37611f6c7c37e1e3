"""Five epochs on the simulated device give the documented figures, within the documented bounds."""

from __future__ import annotations

import pytest

from train import parity_mnist as parity


@pytest.mark.slow
@pytest.mark.parametrize("policy", parity.BOUNDS)
def test_five_epochs_give_every_documented_figure(policy, fashion_mnist):
    figures, problems, _ = parity.run_policy(policy, fashion_mnist, progress=False)
    assert len(figures) == 20
    assert [str(figure) for figure in figures if not figure.holds] + problems == []
