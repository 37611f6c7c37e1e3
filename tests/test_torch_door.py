"""PyTorch's door: modules through torch.compile on the simulated device, beside eager PyTorch."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.entry_points import installed  # noqa: E402
from tests.torch_beside import CLOSE, assert_close, compiled  # noqa: E402
from tpuflow.errors import ConfigError, DataError, UnsupportedDtypeError, UnsupportedPrimitiveError  # noqa: E402
from tpuflow.torch import GraphBreakWarning, explain, lowers  # noqa: E402

pytestmark = pytest.mark.torch

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    )


def steps(model: Any, parameters: Any, count: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    torch.manual_seed(1)
    for _ in range(count):
        loss = F.cross_entropy(model(torch.randn(8, 3, 8, 8)), torch.randint(0, 5, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_convnet_trains_as_in_pytorch_and_its_buffers_follow():
    net = convnet()
    plain, made = copy.deepcopy(net), compiled(net)
    assert steps(made, net.parameters()) == pytest.approx(steps(plain, plain.parameters()), rel=CLOSE)
    for (name, found), expected in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_close(found, expected, name)
    net.eval()
    plain.eval()
    with torch.no_grad():
        x = torch.randn(2, 3, 8, 8)
        assert_close(made(x), plain(x))
    assert int(net[1].num_batches_tracked) == 3


# --- random numbers, buffers, breaks, forms of calls -----------------------------------------------------------------------


def test_dropout_draws_from_a_key_that_the_seed_decides():
    x = torch.ones(100, 100, requires_grad=True)
    dropped = compiled(lambda x: (F.dropout(x, 0.25), torch.rand(50, 50), torch.randn_like(x)))

    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return dropped(x)

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    kept, uniform, normal = first
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float((kept > 0).float().mean()) == pytest.approx(0.75, abs=0.02)  # 5 standard deviations of 10^4 draws
    assert (float(uniform.mean()), float(normal.mean()), float(normal.std())) == pytest.approx((0.5, 0.0, 1.0), abs=0.05)
    (gradient,) = torch.autograd.grad(kept.sum(), x)
    assert torch.equal(gradient, kept)  # the mask of the backward pass is that of the forward pass


class Odd(nn.Module):
    """Buffers of several types, keyword arguments, nested results, inputs changed in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Any, *, scale: float, log: Any = None) -> dict[str, Any]:
        y = self.linear(x) * scale
        self.seen += len(x)
        self.average.lerp_(y.detach().mean(0), 0.1)
        if log is not None:
            log.add_(1)
        return {"y": y, "pair": (y.argmax(1), y.t()), "none": None, "x": x, "view": y[0]}


def test_calls_of_any_form_change_buffers_and_inputs_as_in_pytorch():
    model = Odd()
    plain, made = copy.deepcopy(model), compiled(model)
    x, logs = torch.randn(4, 3), (torch.zeros(2), torch.zeros(2))
    for size in (4, 2, 3):  # of changing size: symbolic shapes
        found, expected = made(x[:size], scale=0.5, log=logs[0]), plain(x[:size], scale=0.5, log=logs[1])
        assert found.keys() == expected.keys() and found["pair"][0].dtype == torch.int64
        for a, b in zip(*(torch.utils._pytree.tree_leaves(r) for r in (found, expected)), strict=True):
            assert_close(a, b)
    for results in (found, expected):
        results["y"].sum().backward()
    assert_close(model.linear.weight.grad, plain.linear.weight.grad)
    assert_close(logs[0], logs[1])
    assert int(model.seen) == 9
    assert_close(model.average, plain.average)


def test_what_comes_out_is_the_callers_own_memory():
    x = torch.randn(64, 64)
    a, b, same = compiled(lambda x: (x + 1, x + 1, x.view(64 * 64)))(x)
    a += 1
    assert torch.equal(b, x + 1)
    x.zero_()
    assert not same.any()  # a view of an input stays one


def broken(x: Any) -> Any:
    y = x * 2
    if float(y.sum()) > 0:
        y = y + 1
    return y.relu()


def test_a_graph_break_is_said_once_with_its_line_and_changes_no_value():
    x = torch.randn(5)
    explained = explain(broken, x)
    assert len(explained.graphs) == 2 and len(explained.breaks) == 1
    assert f"{Path(__file__).name}:" in str(explained) and "in broken" in str(explained)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            assert_close(compiled(broken)(x), broken(x))
    assert sum(w.category is GraphBreakWarning for w in caught) == 1


def test_a_policy_and_a_chip_are_options():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    product = compiled(lambda a, b: a @ b, policy="bf16", chip="tpu-v3")(a, b)
    assert product.dtype == torch.float32
    assert 1e-4 < float((product - a @ b).abs().max() / (a @ b).abs().max()) < 1e-2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"chop": "tpu-v3"}, "Did you mean 'chip'"),
        ({"chip": "tpu-v33"}, "tpu-v3"),
        ({"policy": "half"}, "polic"),
        ({"engine": "slow"}, "engine"),
    ],
)
def test_a_wrong_option_is_named(options, complaint):
    with pytest.raises(Exception, match=complaint) as caught:
        compiled(lambda x: x + 1, **options)(torch.ones(2))
    assert "ConfigError" in str(caught.value) or isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("function", "argument", "complaint"),
    [
        (lambda x: x + 1, torch.ones(2, dtype=torch.float64), "float64.*x.float()"),
        (lambda x: x + 1, torch.ones(2, dtype=torch.complex64), "complex64"),
        (lambda x: x.double().sum(), torch.ones(2), "test_torch_door.py:.*float64"),
        (lambda x: x + 1, torch.tensor([2**40]), "32 bits"),
        (lambda x: x * 2**40, torch.tensor([1]), "1099511627776"),
        (lambda x: torch.linalg.qr(x)[1], torch.ones(2, 2), r"test_torch_door.py:.*aten.linalg_qr.default.*nearest.*tpuflow.torch.lowers"),
        (lambda x: torch.bincount(x.long().flatten(), minlength=3).float(), torch.ones(2, 2), "bincount|break"),
    ],
)  # fmt: skip
def test_what_the_device_cannot_take_is_named_with_its_line(function, argument, complaint):
    known = (UnsupportedDtypeError, UnsupportedPrimitiveError, DataError)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(function)(argument)
        said = " ".join(str(w.message) for w in caught)
        assert said, "neither an error nor a graph break"
    except Exception as error:
        said = str(error)
        assert isinstance(error, known) or any(kind.__name__ in said for kind in known)
    assert re.search(complaint, said, re.DOTALL)


class Distances(nn.Module):
    """Something without a row, inside of layers."""

    def forward(self, x: Any) -> Any:
        return torch.cdist(x, x)


def test_what_has_no_row_is_named_with_the_module_that_it_is_in():
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Distances()))
    with pytest.raises(Exception, match=r"test_torch_door.py:\d+ in forward \(1\.1\): no row for aten._cdist_forward.default"):
        compiled(net)(torch.ones(3, 3))


def test_a_row_can_be_entered_for_an_operator_of_ones_own():
    @torch.library.custom_op("tpuflow_test::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:  # type: ignore[reportInvalidTypeForm]
        return x * 3

    triple.register_fake(torch.empty_like)
    with pytest.raises(Exception, match="tpuflow_test.triple.default"):
        compiled(lambda x: triple(x))(torch.ones(2))
    lowers("tpuflow_test.triple.default")(lambda x: x * 3)
    torch._dynamo.reset()
    assert compiled(lambda x: triple(x))(torch.ones(2)).tolist() == [3, 3]
    with pytest.raises(ConfigError, match="aten.relu.default"):
        lowers("triple")


@pytest.mark.slow
def test_the_entry_point_is_found_in_a_fresh_process_and_tpuflow_alone_needs_no_torch(tmp_path):
    code = (
        "import sys, tpuflow; tpuflow.jit; assert 'torch' not in sys.modules\n"
        f"sys.path.insert(0, {installed(tmp_path, 'torch_dynamo_backends')!r}); import torch\n"
        "print(torch.compile(lambda x: x + 1, backend='tpuflow')(torch.ones(2)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "squeezenet1_1"])
def test_models_of_others_take_three_steps_as_in_pytorch(name):
    if any(find_spec(package) is None for package in ("transformers", "diffusers", "torchvision")):
        pytest.skip("the extra torch-models is not installed")
    from bench.torch_models import in_a_process
    from bench.torch_zoo import ZOO

    outcome = in_a_process(next(entry for entry in ZOO if entry.name == name))
    assert outcome.good, outcome.failure or outcome.row()
