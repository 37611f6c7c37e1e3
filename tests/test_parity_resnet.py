"""A training step of ResNet-50 beside PyTorch's and beside float64, in fp32 and in short types."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tolerances import RESNET50
from train import cifar10, parity_resnet


@pytest.mark.slow
@pytest.mark.torch
def test_a_step_of_resnet_50_at_224_is_pytorchs_and_its_gradients_are_as_near_to_float64(torch):
    figures = parity_resnet.report(cifar10.load(), policies=(), beside_jit=False)
    beside = figures["beside PyTorch"]
    assert max(beside["logits"], beside["loss"], beside["statistics"]) <= parity_resnet.STATE_BOUND
    assert len(figures["ratios"]) == 161 and max(figures["ratios"].values()) <= parity_resnet.GRADIENT_RATIO, figures["ratios"]
    assert min(figures["against float64"]["PyTorch"]["gradients"].values()) > 0.0, "the reference must not be compared with itself"


@pytest.fixture(scope="module")
def resnet_at_64(torch):
    """(the twins, a batch at 64x64, the step in float64)."""
    twin = parity_resnet.Twin(parity_resnet.LAST_SCALE)
    batch = parity_resnet.batch_of(cifar10.load(), 64)
    return twin, batch, twin.step(batch, "float64")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("policy", RESNET50)
def test_a_step_of_resnet_50_in_short_types_is_within_its_bounds_of_float64(policy, resnet_at_64):
    twin, batch, exact = resnet_at_64
    found, bound = (
        parity_resnet.errors(parity_resnet.our_step(twin, batch, policy, **parity_resnet.POLICIES[policy]), exact),
        RESNET50[policy],
    )
    worst = {**found, "gradients": max(found["gradients"].values())}
    assert {name: value for name, value in worst.items() if not value <= getattr(bound, name)} == {}


def test_an_error_is_judged_beside_pytorchs_own_and_nan_never_holds():
    assert parity_resnet.gradient_ratios({"w": 4e-6}, {"w": 2e-6}) == {"w": pytest.approx(2.0)}
    assert parity_resnet.error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert not parity_resnet.gradient_ratios({"w": np.nan}, {"w": 1.0})["w"] <= parity_resnet.GRADIENT_RATIO
