"""PyTorch twins of the networks in models/: the networks of the documents and, with its module names, torchvision's.

PyTorch is optional: only exporting, parity, benchmarks and tests marked `torch` import this module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    """The perceptron of the documented MNIST example."""

    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x):
        return self.linear_relu_stack(self.flatten(x))


class ReLUReduceMeanDense(nn.Module):
    """relu, mean over the image, dense."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.dense = nn.Linear(channels, classes)

    def forward(self, x):
        return self.dense(F.relu(x).mean((2, 3)))


class SmallNet(nn.Module):
    """LeNet-5 (one channel, convolutions without bias), or the network of the CIFAR-10 tutorial (three channels, with bias)."""

    def __init__(self, channels: int, *, conv_bias: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5, bias=conv_bias)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=conv_bias)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class SamePad(nn.Module):
    """The padding that pad_mode="same" gives a window at a stride: the odd row and column at the end."""

    def __init__(self, window: int, stride: int, value: float):
        super().__init__()
        self.window, self.stride, self.value = window, stride, value

    def forward(self, x):
        pads = []
        for extent in (x.shape[3], x.shape[2]):
            total = max((-(-extent // self.stride) - 1) * self.stride + self.window - extent, 0)
            pads += [total // 2, total - total // 2]
        return F.pad(x, pads, value=self.value)


class Conv(nn.Conv2d):
    """A convolution without bias that pads evenly, or as "same" does."""

    def __init__(self, inputs: int, outputs: int, window: int, stride: int, *, even: bool):
        super().__init__(inputs, outputs, window, stride, padding=window // 2 if even else 0, bias=False)
        self.even = even

    def forward(self, input):
        return super().forward(input if self.even else SamePad(self.kernel_size[0], self.stride[0], 0.0)(input))


def _norm(channels: int, epsilon: float) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=epsilon, momentum=0.1)  # PyTorch's momentum is the share of the new batch


class ResidualBlock(nn.Module):
    """Convolutions of (features, window, stride), each normalised, and a way around them."""

    def __init__(self, inputs: int, convolutions: list[tuple[int, int, int]], *, even: bool, epsilon: float):
        super().__init__()
        self.count = len(convolutions)
        outputs, total_stride = inputs, 1
        for i, (features, window, stride) in enumerate(convolutions, 1):
            setattr(self, f"conv{i}", Conv(outputs, features, window, stride, even=even))
            setattr(self, f"bn{i}", _norm(features, epsilon))
            outputs, total_stride = features, total_stride * stride
        self.downsample = None
        if inputs != outputs or total_stride != 1:
            self.downsample = nn.Sequential(Conv(inputs, outputs, 1, total_stride, even=even), _norm(outputs, epsilon))

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = F.relu(y) if i < self.count else y
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Residual networks under torchvision's module names."""

    def __init__(self, stages: tuple[int, ...], *, bottleneck: bool, classes: int, even: bool, epsilon: float, width: int = 64):
        super().__init__()
        self.conv1 = Conv(3, width, 7, 2, even=even)
        self.bn1 = _norm(width, epsilon)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if even else nn.Sequential(SamePad(3, 2, -torch.inf), nn.MaxPool2d(3, 2))
        inputs = width
        for stage, blocks in enumerate(stages):
            features, layer = width << stage, []
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                rows = [(features, 1, 1), (features, 3, stride), (4 * features, 1, 1)]
                rows = rows if bottleneck else [(features, 3, stride), (features, 3, 1)]
                layer.append(ResidualBlock(inputs, rows, even=even, epsilon=epsilon))
                inputs = rows[-1][0]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layer))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(4):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


class VGG16(nn.Module):
    """VGG-16 under torchvision's module names."""

    def __init__(self, classes: int, hidden: int):
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for features in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            layers += [nn.Conv2d(inputs, features, 3, padding=1), nn.ReLU()] if features else [nn.MaxPool2d(2, 2)]
            inputs = features or inputs
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        rows = [nn.Linear(512 * 7 * 7, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout()]
        self.classifier = nn.Sequential(*rows, nn.Linear(hidden, classes))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Fire(nn.Module):
    """Squeeze, then two expansions side by side."""

    def __init__(self, inputs: int, squeeze: int, expand: int):
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def _fires(inputs: int, *rows: tuple[int, int] | None) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for row in rows:
        layers.append(_pool() if row is None else Fire(inputs, *row))
        inputs = inputs if row is None else 2 * row[1]
    return layers


class SqueezeNet(nn.Module):
    """SqueezeNet 1.0 or 1.1 under torchvision's module names."""

    def __init__(self, version: str, classes: int):
        super().__init__()
        a, b, c, d = (16, 64), (32, 128), (48, 192), (64, 256)
        stem, rows = {
            "1.0": (nn.Conv2d(3, 96, 7, 2), _fires(96, None, a, a, b, None, b, c, c, d, None, d)),
            "1.1": (nn.Conv2d(3, 64, 3, 2), _fires(64, None, a, a, None, b, b, None, c, c, d, d)),
        }[version]
        self.features = nn.Sequential(stem, nn.ReLU(), *rows)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)))

    def forward(self, x):
        return torch.flatten(self.classifier(self.features(x)), 1)
