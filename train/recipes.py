"""The table of recipes: `python -m train NAME`."""

from __future__ import annotations

from collections.abc import Mapping

from train import (
    bert,
    cifar,
    cifar_deepspeed,
    clm,
    generate,
    lenet,
    lenet_custom_loop,
    mnist,
    relu_reduce_mean_dense,
    resnet,
    squeezenet,
    text_to_image,
    text_to_image_sample,
    vgg16,
    yolov5,
    yolov5_detect,
    yolov5_val,
)
from train.recipe import Recipe

RECIPES: Mapping[str, Recipe] = {
    row.name: row
    for row in (
        mnist.RECIPE,
        lenet.RECIPE,
        lenet_custom_loop.RECIPE,
        cifar.RECIPE,
        cifar_deepspeed.RECIPE,
        resnet.RECIPE_50,
        resnet.RECIPE_101,
        vgg16.RECIPE,
        squeezenet.RECIPE,
        relu_reduce_mean_dense.RECIPE,
        clm.RECIPE,
        generate.RECIPE,
        bert.RECIPE,
        text_to_image.RECIPE,
        text_to_image_sample.RECIPE,
        yolov5.RECIPE,
        yolov5_val.RECIPE,
        yolov5_detect.RECIPE,
    )
}
"""Name -> recipe."""
