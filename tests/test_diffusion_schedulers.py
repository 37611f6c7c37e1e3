"""Noise schedules and schedulers are diffusers': every table, every step, from its own configuration files."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import tpuflow
from train.diffusion.schedulers import DDIM, DDPM, SCHEDULERS, Euler, Scheduler, Step

CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 1e-6}
"""diffusers computes the same formulas in fp32; roots and quotients differ by units in the last place."""
ROOTS = 4e-6
"""PyTorch's square roots are not all rounded to the nearest, which the betas of the last, nearly equal roots show."""
LATENT: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
"""The betas of Stable Diffusion."""
SHAPE = (2, 4, 4, 3)

CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "stable-diffusion-1": {**LATENT, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1},
    "stable-diffusion-2": {**LATENT, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1, "prediction_type": "v_prediction"},
    "zero-terminal-snr": {
        **LATENT, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction", "clip_sample": False,
    },
    "cosine": {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "linspace", "prediction_type": "sample"},
    "clipped": {"clip_sample": True, "clip_sample_range": 0.5, "num_train_timesteps": 300, "timestep_spacing": "trailing"},
    "given-betas": {"trained_betas": [0.1, 0.2, 0.3, 0.4], "num_train_timesteps": 4, "clip_sample": False},
}  # fmt: skip


def theirs(diffusers: ModuleType, kind: type[Scheduler], config: dict[str, Any]) -> Any:
    """diffusers' scheduler of a configuration, as it makes one from the file of another class."""
    return getattr(diffusers, kind.ARCHITECTURE).from_config({**config})


def arrays(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(3).standard_normal((count, *SHAPE)).astype(np.float32))


@pytest.mark.torch
@pytest.mark.parametrize("kind", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tables_are_those_of_diffusers(diffusers: ModuleType, kind: type[Scheduler], config: dict[str, Any]) -> None:
    original, ours = theirs(diffusers, kind, config), kind.from_json(config)
    exact = {"rtol": 0, "atol": ROOTS if ours.rescale_betas_zero_snr else 0}
    np.testing.assert_allclose(ours.betas, original.betas, **exact)
    np.testing.assert_allclose(ours.alphas_cumprod, original.alphas_cumprod, rtol=0, atol=min(exact["atol"], 1e-6))
    for steps in (1, 4, 20, 50, 199):
        if steps <= ours.num_train_timesteps:
            original.set_timesteps(steps)
            np.testing.assert_array_equal(ours.timesteps(steps), original.timesteps.numpy())
            assert ours.initial_deviation(steps) == pytest.approx(float(original.init_noise_sigma), rel=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("kind", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_step_is_that_of_diffusers(
    diffusers: ModuleType, torch: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: type[Scheduler], config: dict[str, Any]
) -> None:
    original, ours = theirs(diffusers, kind, config), kind.from_json(config)
    steps = min(10, ours.num_train_timesteps)
    original.set_timesteps(steps)
    noises = arrays(steps)
    tables, sample = ours.steps(steps), torch.from_numpy(arrays(steps + 1)[-1])
    for number, timestep in enumerate(original.timesteps):
        at = Step(*(table[number] for table in tables))
        output = torch.from_numpy(noises[number])
        monkeypatch.setattr(f"{type(original).__module__}.randn_tensor", lambda *_, drawn=noises[number], **__: torch.from_numpy(drawn))
        scaled = original.scale_model_input(sample, timestep)
        np.testing.assert_allclose(ours.scaled(at, jnp.asarray(sample)), scaled, **CLOSE)
        found = ours.step(at, jnp.asarray(output), jnp.asarray(sample), noises[number] if kind is DDPM else None)
        sample = original.step(output, timestep, sample, return_dict=False)[0]
        assert np.isfinite(sample.numpy()).all()
        np.testing.assert_allclose(found, sample, **CLOSE)


@pytest.mark.torch
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_noise_of_ddim_is_that_of_diffusers(diffusers: ModuleType, torch: ModuleType, eta: float) -> None:
    config = CONFIGS["stable-diffusion-1"]
    original, ours = diffusers.DDIMScheduler.from_config(config), DDIM(**{**config, "eta": eta})
    original.set_timesteps(20)
    tables, (output, sample, noise) = ours.steps(20), arrays(3)
    for number in (0, 11, 19):
        given = [torch.from_numpy(array) for array in (output, sample)]
        expected = original.step(
            given[0], original.timesteps[number], given[1], eta=eta, variance_noise=torch.from_numpy(noise)
        ).prev_sample
        found = ours.step(Step(*(table[number] for table in tables)), output, sample, noise)
        np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.torch
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_noise_is_added_as_in_training_with_diffusers_and_on_the_device(
    diffusers: ModuleType, torch: ModuleType, config: dict[str, Any]
) -> None:
    original, ours = diffusers.DDPMScheduler.from_config(config), DDPM.from_json(config)
    samples, noise = arrays(2)
    timesteps = np.array([0, ours.num_train_timesteps - 1], np.int32)
    given = [torch.from_numpy(array) for array in (samples, noise, timesteps.astype(np.int64))]
    on_device = tpuflow.jit(lambda *arrays: (ours.add_noise(*arrays), ours.velocity(*arrays)))(samples, noise, timesteps)
    for found, expected in zip(on_device, (original.add_noise(*given), original.get_velocity(*given)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.torch
def test_a_file_of_another_class_is_read_as_diffusers_does(diffusers: ModuleType) -> None:
    written = dict(diffusers.PNDMScheduler.from_config({**LATENT, "steps_offset": 1, "skip_prk_steps": True}).config)
    for kind in SCHEDULERS.values():
        original, ours = getattr(diffusers, kind.ARCHITECTURE).from_config(written), kind.from_json(written)
        shared = {name: value for name, value in ours.to_json().items() if name in original.config and name != "_class_name"}
        assert shared == {name: original.config[name] for name in shared}
        again = getattr(diffusers, kind.ARCHITECTURE).from_config(ours.to_json())
        assert {name: again.config[name] for name in shared} == shared


def test_without_terminal_signal_nothing_is_left_at_the_end() -> None:
    assert DDIM(rescale_betas_zero_snr=True).alphas_cumprod[-1] == 0
    assert 0 < Euler(rescale_betas_zero_snr=True).alphas_cumprod[-1] < 1e-7


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (DDIM, {"thresholding": True}, "scheduler_config.json for DDIMScheduler: thresholding is True, only False is computed"),
        (DDPM, {"beta_schedule": "sigmoid"}, "beta_schedule is 'sigmoid', expected one of linear, scaled_linear, squaredcos_cap_v2"),
        (DDPM, {"variance_type": "learned"}, "variance_type is 'learned', expected one of fixed_small, "),
        (Euler, {"use_karras_sigmas": True, "timestep_type": "continuous"}, "use_karras_sigmas is True.*; timestep_type is 'continuous'"),
        (DDIM, {"beta_start": 0.5, "beta_end": 0.1}, "expected 0 < beta_start <= beta_end < 1"),
        (DDIM, {"trained_betas": [0.5]}, "trained_betas are 1, expected num_train_timesteps, 1000"),
        (DDIM, {"steps_offset": 0.5}, "steps_offset is 0.5, expected a whole number"),
    ],
)
def test_what_is_not_computed_here_is_refused(kind: type[Scheduler], config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.from_json(config)


@pytest.mark.parametrize(
    ("config", "steps", "message"),
    [
        ({}, 0, "0 steps of sampling: expected 1 to num_train_timesteps, 1000"),
        ({}, 1001, "1001 steps of sampling"),
        ({"steps_offset": 1}, 1000, "are 1000 timesteps from 1000 to 1, expected 1000 between 0 and 999"),
    ],
)
def test_steps_that_a_schedule_does_not_have_are_refused(config: dict[str, Any], steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDIM.from_json(config).steps(steps)


def test_a_scheduler_is_a_pure_function_of_a_row() -> None:
    ours, (output, sample, _) = DDIM(), arrays(3)
    tables = ours.steps(3)
    rows = [Step(*(table[number] for table in tables)) for number in range(3)]
    looped = jax.lax.scan(lambda x, at: (ours.step(at, output, x, None),) * 2, sample, jax.tree.map(jnp.asarray, tables))[1]
    for at, found in zip(rows, looped, strict=True):
        sample = ours.step(at, output, sample, None)
        np.testing.assert_allclose(found, sample, rtol=1e-6, atol=1e-6)
