"""YOLOv5's network and loss beside PyTorch's, its targets by properties, its weights in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuflow
from models.yolov5 import TORCH_LAYERS, Detect, YOLOv5, decode, yolov5
from models.yolov5_config import P5, P6, P6_ANCHORS, Architecture, Config
from tpuflow.importers import flax_params, state_dict
from train.detection.boxes import iou, xywh_to_xyxy, xyxy_to_xywh
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss, objectness, pixels
from train.detection.targets import Targets, build_targets

NARROW = Config(1 / 9, 0.125, classes=5)
NARROW_P6 = replace(NARROW, anchors=P6_ANCHORS)
PARAMETERS = {"yolov5n": 1872157, "yolov5s": 7235389, "yolov5m": 21190557, "yolov5l": 46563709, "yolov5x": 86749405}
"""Those of the release, with 80 classes."""
MILLIONS_FUSED = {"yolov5n6": 3.2, "yolov5s6": 12.6, "yolov5m6": 35.7, "yolov5l6": 76.7, "yolov5x6": 140.7}
"""As the release counts them in its table: normalisations are part of their convolutions."""


def variable_shapes(network: YOLOv5) -> Any:
    return jax.eval_shape(network.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32))


def cfg(architecture: Architecture = P5, **changes: Any) -> dict[str, Any]:
    """What a configuration file of the release holds."""
    backbone, head = (
        [[row.sources[0] if len(row.sources) == 1 else list(row.sources), row.blocks, row.kind, list(row.options)] for row in rows]
        for rows in (architecture.backbone, architecture.head)
    )
    anchors = [[side for pair in of_map for side in pair] for of_map in architecture.anchors]
    whole = {"nc": 80, "depth_multiple": 0.33, "width_multiple": 0.5, "anchors": anchors, "backbone": backbone, "head": head}
    return {**whole, **changes}


def parameters(variables: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_size_has_as_many_parameters_as_the_release(name: str) -> None:
    assert parameters(variable_shapes(yolov5(name))) == PARAMETERS[name]


@pytest.mark.parametrize("name", MILLIONS_FUSED)
def test_every_size_with_four_maps_has_as_many_parameters_as_the_release(name: str) -> None:
    variables = variable_shapes(yolov5(name))
    channels = sum(leaf.size for leaf in jax.tree.leaves(variables["batch_stats"])) // 2
    assert (parameters(variables) - channels) / 1e6 == pytest.approx(MILLIONS_FUSED[name], abs=0.05)


def test_a_configuration_file_gives_the_network_of_its_size() -> None:
    assert yolov5(cfg()).config == yolov5("yolov5s").config
    assert yolov5(cfg(P6)).config == yolov5("yolov5s6").config
    assert yolov5(cfg(), classes=3).config == yolov5("s", classes=3).config
    assert yolov5(cfg(width_multiple=0.125)).config.channels(64) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": cfg()["head"][:-1]}, "layer 24 is missing.* expected .*Detect"),
        ({"backbone": [[-1, 1, "Focus", [64, 3]], *cfg()["backbone"][1:]]}, "layer 0 is .*Focus.*, expected .*Conv.*6.2 and 7.0"),
        ({"head": [*cfg()["head"], [-1, 1, "Conv", [8, 1]]]}, "26 layers, expected 25"),
        ({"head": 3}, "head is 3, expected a list"),
        ({"nc": 0}, "number of classes .* is 0"),
        ({"depth_multiple": "deep"}, "depth_multiple is 'deep', expected a number above 0"),
        ({"anchors": 3}, "anchors are 3, expected for each map"),
        ({"anchors": [[1, 2, 3, 4]] * 3}, "expected three of each of three or four maps"),
        ({"activation": "nn.ReLU()"}, "activation is 'nn.ReLU..', expected nn.SiLU"),
    ],
)
def test_a_configuration_of_another_architecture_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        yolov5(cfg(**changes))


def test_what_a_configuration_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="has no anchors"):
        yolov5({name: value for name, value in cfg().items() if name != "anchors"})
    with pytest.raises(ValueError, match="no size is called 'yolov5q'; there are yolov5n"):
        yolov5("yolov5q")


@pytest.mark.slow
def test_a_new_network_expects_eight_objects_in_an_image() -> None:
    features = [jnp.zeros((1, 2, 2, width)) for width in (32, 64, 128)]
    head = Detect(Config(0.33, 0.125, classes=20)).init(jax.random.key(0), features)["params"]
    for index, stride in enumerate((8, 16, 32)):
        bias = np.asarray(head[f"m_{index}"]["bias"]).reshape(3, 25)
        drawn = 1 / np.sqrt(head[f"m_{index}"]["kernel"].shape[2])
        assert np.all(np.abs(bias[:, 4] - np.log(8 / (640 / stride) ** 2)) <= drawn)
        assert np.all(np.abs(bias[:, 5:] - np.log(0.6 / 19)) <= drawn + 1e-5)
        assert np.all(np.abs(bias[:, :4]) <= drawn)


# -- boxes


SIDES = st.floats(0.25, 8.0, width=32)
PLACES = st.floats(-8.0, 8.0, width=32, allow_subnormal=False)
A_BOX = st.tuples(PLACES, PLACES, SIDES, SIDES)
FOUR = st.lists(A_BOX, min_size=4, max_size=4).map(lambda rows: np.array(rows, np.float32))


@jax.jit
def overlaps(a: Any, b: Any) -> Any:
    """(IoU, CIoU, its gradient by a)."""
    gradient = jax.grad(lambda boxes: jnp.sum(iou(boxes, b, "ciou", "xywh")))(a)
    return iou(a, b, "iou", "xywh"), iou(a, b, "ciou", "xywh"), gradient


@settings(max_examples=60)
@given(FOUR, FOUR)
def test_complete_iou_keeps_what_the_paper_promises(a: np.ndarray, b: np.ndarray) -> None:
    plain, complete, gradient = (np.asarray(part) for part in overlaps(a, b))
    assert np.all(plain >= 0) and np.all(plain <= 1 + 1e-4)
    assert np.all(complete <= plain + 1e-6) and np.all(complete >= -2)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(overlaps(b, a)[1], complete, atol=1e-4)  # symmetric
    np.testing.assert_allclose(overlaps(a, a)[1], 1, atol=1e-4)
    np.testing.assert_allclose(overlaps(4 * a, 4 * b)[1], complete, atol=1e-4)  # whatever the scale
    np.testing.assert_allclose(xyxy_to_xywh(xywh_to_xyxy(a)), a, atol=1e-5)


def test_overlaps_of_corners_are_areas_over_areas() -> None:
    a, b = np.array([0.0, 0, 4, 2]), np.array([[0.0, 0, 4, 2], [2, 0, 6, 2], [10, 10, 11, 11], [1, 0, 2, 1]])
    np.testing.assert_allclose(iou(a, b), [1, 1 / 3, 0, 1 / 8], atol=1e-6)


# -- targets


GRID, MOST = (6, 8), 5
SHARES = st.floats(0.0, 1.0, width=32, allow_subnormal=False)
BOXES = st.lists(st.tuples(SHARES, SHARES, SHARES, SHARES), min_size=2 * MOST, max_size=2 * MOST).map(
    lambda rows: np.array(rows, np.float32).reshape(2, MOST, 4)
)
VALID = st.lists(st.booleans(), min_size=2 * MOST, max_size=2 * MOST).map(lambda flags: np.array(flags).reshape(2, MOST))
CELLS = np.array([[0.5, 1.0], [2.0, 1.5], [3.0, 4.0]], np.float32)
CLASSES = np.arange(2 * MOST, dtype=np.int32).reshape(2, MOST)


@jax.jit
def built(boxes: Any, valid: Any) -> Targets:
    return build_targets(boxes, CLASSES, valid, GRID, CELLS, 4.0)


@settings(max_examples=100)
@given(BOXES, VALID)
def test_the_predictions_that_answer_for_a_box_are_near_it_and_of_its_size(boxes: np.ndarray, valid: np.ndarray) -> None:
    found = jax.tree.map(np.asarray, built(boxes, valid))
    chosen, size = found.chosen, np.array([8, 6], np.float32)
    places = np.stack([found.column, found.row], -1)
    assert np.all(places >= 0) and np.all(places < size)
    assert all(np.isfinite(part).all() for part in found)
    own = boxes.reshape(-1, 4)[found.classes]  # CLASSES number the boxes
    assert valid.reshape(-1)[found.classes[chosen]].all()
    assert np.array_equal(found.image[chosen], found.classes[chosen] // MOST)
    np.testing.assert_array_equal(found.boxes[chosen, 2:], (own[:, 2:] * size)[chosen])
    centre = found.boxes[chosen, :2]
    assert np.all(centre >= -0.5) and np.all(centre < 1.5)  # as far as a prediction reaches, the right and lower border included
    ratio = found.boxes[chosen, 2:] / found.anchors[chosen]
    assert np.all(np.maximum(ratio, 1 / ratio) < 4)
    assert np.array_equal(found.anchors[chosen], CELLS[found.anchor[chosen]])


@settings(max_examples=30)
@given(BOXES, VALID, st.permutations(range(MOST)))
def test_the_order_of_boxes_and_their_padding_change_no_target(boxes: np.ndarray, valid: np.ndarray, order: list[int]) -> None:
    def rows(found: Targets, numbers: np.ndarray) -> set[tuple[Any, ...]]:
        parts = (found.image, found.row, found.column, found.anchor, numbers[found.classes], *np.asarray(found.boxes).T)
        return set(zip(*(np.asarray(part)[found.chosen].tolist() for part in parts), strict=True))

    one = built(boxes, valid)
    other = built(np.where(valid[..., None], boxes, 0.7)[:, order], valid[:, order])
    assert rows(one, CLASSES.reshape(-1)) == rows(other, CLASSES[:, order].reshape(-1))


def test_of_several_boxes_for_one_prediction_the_last_counts() -> None:
    place = np.array([0, 1, 0, 1, 0], np.int32)
    zeros = np.zeros(5, np.int32)
    chosen = np.array([True, True, True, True, False])
    targets = Targets(chosen, zeros, place, zeros, zeros, np.ones((5, 4)), np.ones((5, 2)), zeros)
    found = objectness(jnp.array([0.9, 0.8, 0.3, -0.2, 0.7]), targets, (1, 3, 1, 1))
    np.testing.assert_allclose(found.ravel(), [0.3, 0, 0])


# -- the network and its loss


def a_batch(config: Config, size: int, boxes: int = 6) -> dict[str, np.ndarray]:
    """Two random images; boxes upon each other, at the border and outside of every anchor among theirs."""
    rng = np.random.default_rng(0)
    found = rng.uniform(0.05, 0.95, (2, boxes, 4)).astype(np.float32)
    found[..., 2:] = rng.uniform(0.02, 0.6, (2, boxes, 2))
    found[0, 1] = found[0, 0] * np.float32(1.001)
    found[1, 0, :2] = 1.0
    return {
        "images": rng.integers(0, 256, (2, size, size, 3)).astype(np.uint8),
        "boxes": found,
        "classes": rng.integers(0, config.classes, (2, boxes)).astype(np.int32),
        "valid": rng.random((2, boxes)) < 0.8,
    }


@dataclass(frozen=True)
class Found:
    """Maps, the three losses, gradients and running statistics by the original's names."""

    maps: list[np.ndarray]
    losses: list[float]
    gradients: Mapping[str, np.ndarray]
    statistics: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Compared:
    """The same step computed here and by PyTorch in float32 and float64, from the same weights."""

    ours: Found
    theirs: Found
    exact: Found


SMOOTHING = 0.1


@contextmanager
def two_threads(torch: ModuleType) -> Iterator[None]:
    """PyTorch adds up in an order that depends on its number of threads, whatever the host has: where few numbers are normalised, its
    error, beside which ours is judged, is half or twice as large with another."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compared(torch: ModuleType, config: Config, size: int, hyp: Hyperparameters, seed: int = 0) -> Compared:
    from tests import yolov5_torch
    from train import torch_yolov5

    torch.manual_seed(seed)
    network = torch_yolov5.Network(config).train()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.uniform_(-0.2, 0.2)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    batch = a_batch(config, size)
    boxes = [[b, batch["classes"][b, m], *batch["boxes"][b, m]] for b, m in zip(*np.nonzero(batch["valid"]), strict=True)]
    images, boxes = torch.from_numpy(batch["images"]).permute(0, 3, 1, 2).float() / 255, torch.tensor(np.array(boxes, np.float32))

    def in_torch(kind: Any) -> Found:
        network.to(kind).zero_grad()
        network.load_state_dict(weights)
        maps = network(images.to(kind))
        losses = yolov5_torch.losses(maps, boxes, config, hyp, size, SMOOTHING)
        (sum(losses) * len(images)).backward()
        gradients = {name: parameter.grad.numpy().copy() for name, parameter in network.named_parameters()}
        statistics = {name: tensor.numpy().copy() for name, tensor in network.state_dict().items() if "running" in name}
        return Found([x.detach().numpy() for x in maps], [float(loss.detach()) for loss in losses], gradients, statistics)

    with two_threads(torch):
        theirs, exact = in_torch(torch.float32), in_torch(torch.float64)
    return Compared(ours_of({name: tensor.numpy() for name, tensor in weights.items()}, config, size, hyp, batch), theirs, exact)


def ours_of(weights: Mapping[str, np.ndarray], config: Config, size: int, hyp: Hyperparameters, batch: Any) -> Found:
    network, loss = YOLOv5(config), DetectionLoss(config, hyp, size, SMOOTHING)
    variables = flax_params(weights, variable_shapes(network), TORCH_LAYERS)

    def of(params: Any, statistics: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        maps, carried = network.apply(variables, pixels(batch), train=True, mutable=["batch_stats"])
        whole, losses = loss(maps, batch)
        return whole, (maps, losses, carried)

    found = jax.jit(jax.value_and_grad(of, has_aux=True))(variables["params"], variables["batch_stats"])
    (_, (maps, losses, carried)), gradients = found
    turned = [np.asarray(x).transpose(0, 3, 1, 2, 4) for x in maps]  # [B, H, W, A, 5 + C] -> [B, A, H, W, 5 + C]
    return Found(
        turned, [float(losses[name]) for name in ("box", "obj", "cls")], state_dict({"params": gradients}, TORCH_LAYERS),
        state_dict(carried, TORCH_LAYERS),
    )  # fmt: skip


def distance(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    return float(np.linalg.norm(np.stack(found) - np.stack(exact)) / np.linalg.norm(np.stack(exact)))


def agree(*steps: Compared) -> None:
    """The errors of gradients are those of all steps together: of a scale of few numbers PyTorch's can be small by luck in one, by which
    processor it is."""
    for made in steps:
        for ours, exact in zip(made.ours.maps, made.exact.maps, strict=True):
            assert np.abs(ours - exact).max() <= 1e-4 * np.abs(exact).max()
        np.testing.assert_allclose(made.ours.losses, made.exact.losses, rtol=1e-5)
        assert made.ours.gradients.keys() == made.exact.gradients.keys()
        for name, exact in made.exact.statistics.items():
            np.testing.assert_allclose(made.ours.statistics[name], exact, rtol=1e-4, atol=1e-5)
    for name in steps[0].exact.gradients:
        exact = [made.exact.gradients[name] for made in steps]
        own, theirs = (
            distance([of.gradients[name] for of in found], exact) for found in zip(*((m.ours, m.theirs) for m in steps), strict=True)
        )
        assert own <= 3 * theirs, name


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("config", "hyp"),
    [
        (NARROW, Hyperparameters(cls_pw=0.9, obj_pw=1.2)),
        (NARROW_P6, Hyperparameters()),
        (replace(NARROW, classes=1), Hyperparameters(fl_gamma=1.5)),
    ],
    ids=["weighted", "four maps", "one class, focal"],
)
def test_a_narrow_network_and_its_loss_agree_with_pytorch(torch: ModuleType, config: Config, hyp: Hyperparameters) -> None:
    agree(*(compared(torch, config, 2 * config.strides[-1], hyp, seed) for seed in range(3)))


@pytest.mark.slow
@pytest.mark.torch
def test_yolov5s_and_its_loss_agree_with_pytorch_at_320(torch: ModuleType) -> None:
    agree(compared(torch, yolov5("yolov5s").config, 320, Hyperparameters()))


@pytest.mark.torch
@settings(max_examples=25)
@given(boxes=BOXES, valid=VALID)
def test_targets_are_those_of_the_reference_in_its_order(torch: ModuleType, boxes: np.ndarray, valid: np.ndarray) -> None:
    from tests import yolov5_torch

    found = jax.tree.map(np.asarray, built(boxes, valid))
    rows = [[b, CLASSES[b, m], *boxes[b, m]] for b, m in zip(*np.nonzero(valid), strict=True)]
    listed = torch.tensor(np.array(rows, np.float32).reshape(-1, 6))
    expected = yolov5_torch.candidates(listed, torch.from_numpy(CELLS), *GRID, 4.0)
    ours = [part[found.chosen] for part in (found.image, found.anchor, found.row, found.column, found.classes)]
    assert np.stack(ours, -1).tolist() == [[c.image, c.anchor, c.row, c.column, c.label] for c in expected]
    if expected:
        np.testing.assert_array_equal(found.boxes[found.chosen], np.stack([c.box for c in expected]))


@pytest.mark.slow
def test_the_loss_on_the_device_is_that_of_plain_jax() -> None:
    batch = {name: array for name, array in a_batch(NARROW, 64).items() if name != "images"}
    rng, loss = np.random.default_rng(1), DetectionLoss(NARROW, Hyperparameters(), 64)
    maps = tuple(rng.normal(size=(2, 64 // s, 64 // s, 3, 10)).astype(np.float32) for s in NARROW.strides)

    def of(maps: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda maps: loss(maps, batch), has_aux=True)(maps)

    here, there = jax.jit(of)(maps, batch), tpuflow.jit(of)(maps, batch)
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7 * float(np.abs(a).max()) + 1e-9)


def test_decoded_predictions_are_boxes_in_pixels() -> None:
    maps = [np.zeros((1, 64 // stride, 32 // stride, 3, 10), np.float32) for stride in NARROW.strides]
    found = np.asarray(decode([jnp.asarray(x) for x in maps], NARROW))
    assert found.shape == (1, 3 * (8 * 4 + 4 * 2 + 2 * 1), 10)
    np.testing.assert_allclose(found[0, 0], [4, 4, 10, 13, *[0.5] * 6])  # the first cell of 8 pixels, half an objectness
    np.testing.assert_allclose(found[0, 32 + 4], [4, 12, 16, 30, *[0.5] * 6])  # the second anchor, the first cell of the second row
    np.testing.assert_allclose(found[0, -1], [16, 48, 373, 326, *[0.5] * 6])
