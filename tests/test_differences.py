"""Two reports of a step side by side: what was changed, what it changes, and why."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import tpuflow
from tpuflow import cli
from tpuflow.chips import get_chip
from tpuflow.errors import ConfigError
from tpuflow.estimating.estimating import Estimate


class Net(nn.Module):
    """Two dense layers, the second as wide as `wide`."""

    wide: int = 256

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(nn.Dense(1024, name="first")(x))
        return nn.Dense(self.wide, name="second")(x)


@functools.cache
def net(batch: int = 512, chip: str = "tpu-v3", policy: str = "fp32", wide: int = 256) -> Estimate:
    shapes = jax.ShapeDtypeStruct((batch, 1024), jnp.float32), jax.ShapeDtypeStruct((batch, wide), jnp.float32)
    return tpuflow.estimate_training(Net(wide), shapes, chip=chip, policy=policy, optimizer=optax.sgd(0.1))


def causes(found: tpuflow.Differences) -> str:
    return "; ".join(cause for row in found.layers for cause in row.causes)


def test_a_report_does_not_differ_from_itself():
    found = tpuflow.diff(net(), net())
    assert found.settings == [] and found.layers == ()
    assert all(row.before == row.after for row in found.rows)
    assert "settings and chip are the same" in str(found) and "no layer differs" in str(found)


def test_layers_add_up_to_the_difference_of_the_device_time():
    found = tpuflow.diff(net(), net(policy="mixed_bf16"))
    times = {row.name: row.after - row.before for row in found.rows}
    assert sum(row.seconds for row in found.layers) == pytest.approx(times["device"], rel=1e-9)
    assert times["time"] == pytest.approx(times["device"] + times["waiting for data"] + times["host"], rel=1e-9)
    sizes = [abs(row.seconds) for row in found.layers]
    assert sizes == sorted(sizes, reverse=True)


def test_another_precision_shows_as_setting_and_as_bytes():
    found = tpuflow.diff(net(), net(policy="bf16"))
    assert ("policy", "fp32", "bf16") in found.settings
    first = next(row for row in found.layers if (row.layer, row.phase) == ("Net/first", "forward"))
    assert first.after.hbm_bytes < 0.7 * first.before.hbm_bytes and first.after.macs == first.before.macs
    assert any(cause.startswith("HBM traffic") for cause in first.causes) and "multiply-adds" not in causes(found)


def test_another_batch_size_is_compared_by_the_sample_too():
    rows = {row.name: row for row in tpuflow.diff(net(512), net(1024)).rows}
    assert rows["multiply-adds"].after == 2 * rows["multiply-adds"].before
    assert rows["time a sample"].before == pytest.approx(net(512).step_seconds / 512)
    assert rows["time a sample"].after == pytest.approx(net(1024).step_seconds / 1024)


def test_a_faster_memory_is_named_where_loads_take_less_time():
    slow = get_chip("tpu-v3")
    fast = replace(slow, name="mine", hbm_bytes_per_second=4 * slow.hbm_bytes_per_second, core_hbm_bytes_per_second=0.0)
    step = (lambda x: jnp.tanh(x) + 1, jax.ShapeDtypeStruct((4096, 4096), jnp.float32))
    found = tpuflow.diff(*(tpuflow.estimate(*step, chip=chip) for chip in (slow, fast)))
    assert [name for name, _, _ in found.settings] == ["chip", "HBM bandwidth"]
    (row,) = found.layers
    assert "HBM bandwidth 900 GB/s -> 3600 GB/s" in row.causes and row.seconds < 0
    assert not any("kernels" in cause or "HBM traffic" in cause for cause in row.causes)


def test_a_changed_model_shows_in_its_layers_alone():
    found = tpuflow.diff(net(), net(wide=512))
    changed = {row.layer for row in found.layers if any("multiply-adds" in cause for cause in row.causes)}
    assert changed == {"Net/second"}


def test_what_is_on_one_side_only_is_said_so():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def named(name: str) -> tpuflow.Estimate:
        def step(x: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                return x @ x

        return tpuflow.estimate(step, x)

    found = tpuflow.diff(named("one"), named("other"))
    assert {row.layer: row.causes for row in found.layers} == {"one": ("only before",), "other": ("only after",)}


def test_a_file_gives_the_same_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before, after, page = tmp_path / "before.json", tmp_path / "after.json", tmp_path / "diff.html"
    net().profile().to_json(before)
    after.write_text(json.dumps({**net(1024).as_dict(), "profile": net(1024).profile().as_dict()}))  # as `tpuflow estimate --json` does
    expected = tpuflow.diff(net(), net(1024))
    assert tpuflow.diff(before, str(after)) == expected
    assert cli.main(["diff", str(before), str(after), "--html", str(page), "--layers", "2"]) == 0
    assert capsys.readouterr().out == expected.to_text(2) + "\n"
    assert cli.main(["diff", str(before), str(after), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected.as_dict()))
    text = page.read_text()
    assert (
        "Net on tpu-v3 in fp32" in text
        and "time a sample" in text
        and "<script" not in text
        and "http" not in text.replace("http-equiv", "")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "a list, as of a sweep"),
        ('{"name": "x"}', "no profile of this version .it has no 'settings'."),
        ('{"profile": 3}', "no profile of this version"),
    ],
)
def test_a_file_that_is_no_report_is_refused(content: Any, message: str, tmp_path: Path):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        tpuflow.diff(path, net())
