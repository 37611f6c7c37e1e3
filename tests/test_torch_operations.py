"""Every family of ATen operations on the device, values and gradients, beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from tests.torch_beside import assert_close, compiled  # noqa: E402
from tpuflow.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch


Family = dict[str, Callable[[Any, Any], Any]]

POINTWISE: Family = {
    "exponentials": lambda x, y: torch.exp(x) + torch.expm1(y) + torch.exp2(x) + torch.log1p(y.abs()) + torch.log2(x.abs() + 1),
    "circles": lambda x, y: torch.sin(x) + torch.cos(y) + torch.atan2(x, y) + torch.tanh(x) + torch.asin(y.clamp(-0.9, 0.9)),
    "errors": lambda x, y: torch.erf(x) + torch.erfc(y) + torch.sigmoid(x) + torch.rsqrt(y.abs() + 1),
    "activations": lambda x, y: F.gelu(x) + F.gelu(y, approximate="tanh") + F.silu(x) + F.elu(y) + F.leaky_relu(x) + F.hardtanh(y),
    "more_activations": lambda x, y: F.softplus(x) + F.mish(y) + F.hardswish(x) + F.selu(y) + F.relu6(x) + F.logsigmoid(y) + F.celu(x),
    "divisions": lambda x, y: x / (y.abs() + 1) + torch.div(x, 0.3, rounding_mode="floor") + torch.remainder(x, 0.7) + torch.fmod(y, 0.3),
    "powers": lambda x, y: x**3 + x.abs() ** 0.5 + 2**y + x.abs() ** y + (y.abs() + 1) ** -2 + x.square(),
    "choices": lambda x, y: torch.where(x > y, x, y) + torch.clamp(x, -0.5, 0.5) + torch.maximum(x, y) + x.masked_fill(y > 0, 2.0),
    "rounding": lambda x, y: torch.round(x) + torch.floor(y) * x + torch.trunc(x) * y + torch.sign(x) + y.frac(),
    "scaled": lambda x, y: torch.add(x, y, alpha=2) - torch.rsub(x, y, alpha=3) + torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=0.5),
}
REDUCTIONS: Family = {
    "sums": lambda x, y: x.sum(1) + y.mean(1) + (x.abs() + 0.5).prod(1) + x.amax(1) + y.amin(1) + x.logsumexp(1) + x.norm(dim=1),
    "all_of_it": lambda x, y: x.sum() + y.mean() + x.max() + y.min() + x.std() + y.var(),
    "keepdim": lambda x, y: x.var(1, keepdim=True) + y.std(0, keepdim=True, correction=0) + x.norm(p=1, dim=1, keepdim=True),
    "running": lambda x, y: x.cumsum(1) + (y.abs() + 0.5).cumprod(0),
    "places": lambda x, y: (x.max(1), y.min(0), x.argmax(1), y.argmin(), x.argmax(1, keepdim=True)),
    "order": lambda x, y: (x.sort(1), y.sort(0, descending=True), x.topk(2, 1), y.topk(2, 0, largest=False), x.argsort(1)),
    "softmax": lambda x, y: torch.softmax(x, 1) + torch.log_softmax(y, 0),
    "any_all": lambda x, y: ((x > 0).any(1), (y > 0).all(0), (x > 5).any(), (x.isnan() | y.isinf()).sum()),
    "norms": lambda x, y: F.layer_norm(x, (6,)) + F.group_norm(y, 2) + F.normalize(x) + F.rms_norm(y, (6,)),
}
SHAPES: Family = {
    "views": lambda x, y: (
        x.view(6, 4).t().contiguous() + y.reshape(-1).view(4, 6) + x.unsqueeze(0).squeeze(0) + y.flatten().unflatten(0, (4, 6))
    ),
    "joined": lambda x, y: torch.cat([x, y], 1).chunk(3, 1)[1] + torch.stack([x, y])[1, :, 1:5] + torch.hstack([x[:, :2], y[:, 2:4]]),
    "parts": lambda x, y: (x.split([1, 3, 2], 1), y.unbind(1), x[:, ::2], y[-1], x[1:3, 2:-1]),
    "turned": lambda x, y: x.flip(1) + y.roll(2, 0) + x.roll((1, 2), (0, 1)) + torch.tril(y) + torch.triu(x, 1),
    "spread": lambda x, y: (x.expand(2, 4, 6), y.repeat(2, 3), x[:, None, :] * y[None], y.repeat_interleave(2, 1)),
    "padded": lambda x, y: (
        F.pad(x, (1, 2, 0, 1), value=0.5),
        F.pad(y[None], (2, 1), mode="reflect"),
        F.pad(x[None], (1, 1), mode="replicate"),
    ),
    "diagonals": lambda x, y: (x.diagonal(), y.diagonal(1), torch.diag_embed(x), x.unfold(1, 3, 2), y.as_strided((3, 2), (6, 2), 1)),
    "made": lambda x, y: (
        x + torch.arange(6) + torch.ones(4, 1) + torch.eye(4, 6) + torch.full((4, 6), 0.5) + torch.linspace(0, 1, 6) + y.new_zeros(6)
    ),
    "types": lambda x, y: (x.long() + 1, y.bool(), x.half().float(), (y * 10).int() // 3, x.to(torch.bfloat16), (x > 0).float() * y),
}
PLACES: Family = {
    "indexed": lambda x, y: (
        x[torch.tensor([2, 0, -1])] + y[:3, torch.tensor([1, 1, 5, 0, 2, 3])] + x[torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])][:, None]
    ),
    "gathered": lambda x, y: (
        torch.gather(x, 1, torch.tensor([[0, 5], [2, 2], [1, 0]])) + torch.take_along_dim(y, torch.tensor([[0, 1]] * 4), 1)[:3]
    ),
    "selected": lambda x, y: (
        x.index_select(1, torch.tensor([3, 3, 0])),
        F.embedding(torch.tensor([[1, 3], [1, 1]]), y),
        x.take(torch.tensor([5, 0])),
    ),
    "scattered": lambda x, y: (
        x.scatter(1, torch.tensor([[0, 5, 1, 2, 3, 4]] * 4), y) + torch.zeros(4, 6).scatter_add(0, torch.tensor([[0] * 6, [3] * 6] * 2), y)
    ),
    "put": lambda x, y: (
        x.index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), y[0, :2], accumulate=True) + x.index_add(0, torch.tensor([1, 1]), y[:2])
    ),
    "assigned": lambda x, y: assigned(x, y),
    "one_hot": lambda x, y: F.one_hot(torch.tensor([2, 0, 3, 1]), 6) * x + F.one_hot(y.argmax(1), 6),
    "losses": lambda x, y: (
        F.cross_entropy(x, torch.tensor([1, -100, 5, 0]), label_smoothing=0.1)
        + F.mse_loss(x, y)
        + F.smooth_l1_loss(x, y)
        + F.kl_div(F.log_softmax(x, 1), torch.softmax(y, 1))
        + F.binary_cross_entropy_with_logits(x, torch.sigmoid(y))
    ),
}
PRODUCTS: Family = {
    "matmul": lambda x, y: (x @ y.t(), torch.einsum("ij,kj->ik", x, y), torch.outer(x[0], y[0]), x @ y[0], torch.dot(x[0], y[1])),
    "batched": lambda x, y: (
        torch.bmm(x.view(2, 3, 4), y.view(2, 4, 3)) + torch.baddbmm(x.view(2, 3, 4)[:, :, :3], x.view(2, 3, 4), y.view(2, 4, 3), beta=0.5)
    ),
    "attention": lambda x, y: F.scaled_dot_product_attention(x.view(1, 2, 4, 3), y.view(1, 2, 4, 3), x.view(1, 2, 4, 3), is_causal=True),
    "conv1d": lambda x, y: F.conv1d(x.view(1, 4, 6), y.view(2, 4, 3), stride=2, padding=1),
    "conv2d": lambda x, y: F.conv2d(x.view(1, 2, 3, 4), y.view(4, 1, 3, 2), groups=2, padding=(1, 2), dilation=(1, 2)),
    "conv_transpose": lambda x, y: F.conv_transpose2d(
        x.view(1, 4, 3, 2), y[:, :4].reshape(4, 1, 2, 2), y[0, :2], stride=2, output_padding=1, groups=2
    ),
    "conv3d": lambda x, y: F.conv3d(x.view(1, 1, 2, 3, 4), y.reshape(2, 1, 2, 2, 3)),
}
IMAGES: Family = {
    "max_pool": lambda x, y: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(y, 2, ceil_mode=True), F.max_pool1d(x[0], 3, 1, 1, dilation=1)),
    "ties": lambda x, y: F.max_pool2d(torch.round(x), 3, 1, 1) + F.max_pool2d(torch.zeros_like(y) * y, 3, 1, 1),
    "indices": lambda x, y: (
        F.max_pool2d(torch.round(x), 3, 2, 1, return_indices=True),
        F.max_pool2d(y, (2, 3), dilation=2, return_indices=True),
    ),
    "avg_pool": lambda x, y: (
        F.avg_pool2d(x, 3, 2, 1),
        F.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        F.avg_pool1d(x[0], 2),
    ),
    "adaptive": lambda x, y: (F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(y, 1), F.adaptive_max_pool2d(x, (2, 3))),
    "resampled": lambda x, y: (
        F.interpolate(x, scale_factor=2),
        F.interpolate(y, size=(5, 9), mode="bilinear"),
        F.interpolate(x, size=(4, 4), mode="bicubic"),
    ),
    "shuffled": lambda x, y: (
        F.pixel_shuffle(x, 2),
        F.pixel_unshuffle(y[..., :6, :6], 2),
        F.unfold(x, 3),
        F.batch_norm(y, None, None, training=True),
    ),
}


def assigned(x: Any, y: Any) -> Any:
    """In place, on what the call made itself."""
    z = x * 1
    z[1] = y[0]
    z[:, 2] += 3
    z[z > 1] = 0.25
    z[:, ::3] = y[:, ::3]
    z.mul_(2).clamp_(-3, 3)
    return z


FAMILIES = {
    "pointwise": (POINTWISE, (4, 6)),
    "reductions": (REDUCTIONS, (4, 6)),
    "shapes": (SHAPES, (4, 6)),
    "places": (PLACES, (4, 6)),
    "products": (PRODUCTS, (4, 6)),
    "images": (IMAGES, (2, 4, 7, 7)),
}


def results_and_gradients(function: Any, x: Any, y: Any) -> tuple[list[Any], list[Any]]:
    x, y = (t.clone().requires_grad_() for t in (x, y))
    results = torch.utils._pytree.tree_leaves(function(x, y))
    floats = [r for r in results if r.is_floating_point() and r.requires_grad]
    gradients = torch.autograd.grad(sum((r * r.detach().cos()).sum() for r in floats), (x, y), allow_unused=True) if floats else ()
    return results, list(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_operations_and_its_gradients_are_pytorchs(name):
    family, shape = FAMILIES[name]
    x, y = torch.randn(shape), torch.randn(shape)

    def together(x: Any, y: Any) -> Any:
        return [function(x, y) for function in family.values()]

    for found, expected in zip(results_and_gradients(compiled(together), x, y), results_and_gradients(together, x, y), strict=True):
        assert len(found) == len(expected)
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{name} {place} of {len(expected)}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_numbers_that_follow_from_symbolic_sizes_are_pytorchs(mode):
    def resampled(x: Any) -> Any:
        return torch.nn.functional.interpolate(x, scale_factor=1.7, mode=mode) * (x.shape[2] / 3)

    torch._dynamo.reset()
    function = torch.compile(resampled, backend=backend, dynamic=True)
    for height, width in ((7, 9), (5, 11)):
        x = torch.randn(2, 3, height, width)
        assert_close(function(x), resampled(x))
