"""Object detection."""

from __future__ import annotations

import os
import pickle
import zipfile

import numpy as np

from tests.mistakes.table import CommandFailed, mistake, recipe
from tpuflow.errors import WeightsError
from tpuflow.importers import load_state_dict, save_state_dict


@mistake(CommandFailed, "--data bcdc", "no such file, nor a data set of that name", "Did you mean 'bccd'?")
def a_misspelt_data_set():
    recipe("yolov5-val --data bcdc --weights best.safetensors")


@mistake(CommandFailed, "--data cells", "a folder", "give a file such as cells/data.yaml")
def a_folder_in_place_of_its_description():
    os.makedirs("cells")
    recipe("yolov5-val --data cells --weights best.safetensors")


@mistake(CommandFailed, "data.yaml", "cannot be read as YAML", "line 2")
def a_description_that_is_no_yaml():
    open("data.yaml", "w").write("val: images/val\nnames: [a, b\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "data.yaml", "nc is 3, but there are 2 names", "make them agree")
def more_classes_than_names():
    open("data.yaml", "w").write("val: images/val\nnc: 3\nnames: [red, white]\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "data.yaml: names", "got 1, 2", "expected the numbers 0 to 1")
def names_that_are_numbered_from_one():
    open("data.yaml", "w").write("val: images/val\nnames: {1: red, 2: white}\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "data.yaml", "no 'test'; there are: val", "Name the folder of its pictures there")
def a_split_that_is_not_there():
    os.makedirs("images/val")
    open("data.yaml", "w").write("val: images/val\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --task test --weights best.safetensors")


@mistake(CommandFailed, "data.yaml: val", "there is no images/valid", "Mend the path there")
def a_folder_of_pictures_that_is_not_there():
    open("data.yaml", "w").write("val: images/valid\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "data.yaml: val", "no pictures in images/val", "expected files that end in .bmp")
def a_folder_without_pictures():
    os.makedirs("images/val")
    open("data.yaml", "w").write("val: images/val\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "data.yaml", "(path: cells) was found at none of", "name it or its parent by --data-dir")
def a_data_set_that_is_nowhere():
    open("data.yaml", "w").write("path: cells\nval: images/val\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --data-dir data --weights best.safetensors")


@mistake(
    CommandFailed,
    "data.yaml: val",
    "1 pictures and not one good label; looked for such as pictures/a.txt",
    "labels lie in a folder labels/",
)
def pictures_without_labels():
    from PIL import Image

    os.makedirs("pictures")
    Image.new("RGB", (64, 64)).save("pictures/a.png")
    open("data.yaml", "w").write("val: pictures\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "labels/val/a.txt:1", "320 is no share of the picture", "divide pixels by its width and height")
def labels_in_pixels():
    from PIL import Image

    os.makedirs("images/val")
    os.makedirs("labels/val")
    Image.new("RGB", (640, 480)).save("images/val/a.png")
    open("labels/val/a.txt", "w").write("0 320 240 100 80\n")
    open("data.yaml", "w").write("val: images/val\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "labels/val/a.txt:1", "there is no class 1", "expected 0 to 0, as the data set names 1")
def classes_that_count_from_one():
    from PIL import Image

    os.makedirs("images/val")
    os.makedirs("labels/val")
    Image.new("RGB", (640, 480)).save("images/val/a.png")
    open("labels/val/a.txt", "w").write("1 0.5 0.5 0.2 0.2\n")
    open("data.yaml", "w").write("val: images/val\nnames: [red]\n")
    recipe("yolov5-val --data data.yaml --weights best.safetensors")


@mistake(CommandFailed, "--imgsz", "got 600", "try 608")
def a_size_that_the_network_cannot_halve():
    recipe("yolov5-val --img 600 --weights best.safetensors")


@mistake(CommandFailed, "--weights", "a network of 80 classes, but the data set names 3", "give the data set that it was trained on")
def weights_for_other_classes():
    from PIL import Image

    shapes = {"model.0.conv.weight": (32, 3, 6, 6), "model.6.m.0.cv1.conv.weight": (128, 128, 1, 1), "model.24.m.0.bias": (255,)}
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_state_dict("yolov5s.safetensors", state)
    Image.new("RGB", (64, 64)).save("a.png")
    recipe("yolov5-detect --data bccd --weights yolov5s.safetensors --source a.png")


@mistake(CommandFailed, "--source pictures", "no such file or folder", "expected files that end in")
def pictures_that_are_not_there():
    recipe("yolov5-detect --weights best.safetensors --source pictures")


@mistake(CommandFailed, "--imgsz", "got 300", "try 288")
def frames_that_the_strides_do_not_divide():
    recipe("yolov5 --data bccd --img 300")


@mistake(CommandFailed, "--hyp hyp.yaml", "'momentun' is no hyperparameter", "Did you mean 'momentum'?")
def a_misspelt_hyperparameter():
    open("hyp.yaml", "w").write("lr0: 0.02\nmomentun: 0.9\n")
    recipe("yolov5 --data bccd --hyp hyp.yaml")


@mistake(CommandFailed, "--resume", "no run in runs/train", "give the folder of one")
def a_training_to_resume_that_is_not_there():
    recipe("yolov5 --resume")


@mistake(WeightsError, "last.pt", "would call posix.system", "Save the tensors alone")
def a_checkpoint_that_would_run_a_command():
    class Network:
        def __reduce__(self):
            return os.system, ("rm -rf data",)

    with zipfile.ZipFile("last.pt", "w") as file:
        file.writestr("last/data.pkl", pickle.dumps({"model": Network()}, protocol=2))
    load_state_dict("last.pt")
