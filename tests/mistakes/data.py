"""Data that are empty, of another form, or do not fit the model or the loss."""

from __future__ import annotations

import flax.linen as nn
import numpy as np

import tpuflow
from tests.mistakes.setting import Net, inputs, labels
from tests.mistakes.table import mistake
from tpuflow.errors import ConfigError, DataError


@mistake(DataError, "data", "an int", "arrays (inputs, labels)")
def no_data():
    tpuflow.train(Net(), 5)


@mistake(DataError, "data", "a NoneType", "arrays (inputs, labels)")
def data_that_are_none():
    tpuflow.train(Net(), None)


@mistake(DataError, "data", "mnist.npz", "load")
def a_path_instead_of_data():
    tpuflow.train(Net(), "mnist.npz")


@mistake(ConfigError, "loss", "the data have none", "data=(inputs, labels)")
def inputs_without_labels():
    tpuflow.train(Net(), inputs)


@mistake(DataError, "data", "3", "(inputs, labels)")
def three_arrays():
    tpuflow.train(Net(), (inputs, labels, labels))


@mistake(DataError, "data", "3 parts", "(inputs, labels)")
def three_arrays_in_a_batch():
    tpuflow.train(Net(), [(inputs, labels, labels)])


@mistake(ConfigError, "loss", "an entry called label", "data=(inputs, labels)")
def names_that_do_not_say_which_are_the_labels():
    tpuflow.train(Net(), [{"x": inputs, "classes": labels}])


@mistake(DataError, "inputs", "<U1", "np.unique")
def text_as_inputs():
    tpuflow.train(Net(), (np.array(["a"] * 40), labels))


@mistake(DataError, "labels", "<U3", "np.unique")
def names_as_labels():
    names = np.array(["cat", "dog", "cow"])[labels]
    tpuflow.train(Net(), (inputs, names))


@mistake(DataError, "inputs", "complex64", "np.stack([x.real, x.imag], axis=-1)")
def complex_inputs():
    tpuflow.train(Net(), (inputs.astype(np.complex64), labels))


@mistake(DataError, "data: inputs", "a single number", "np.stack(samples)")
def lists_of_unequal_lengths():
    rows = [[0.0] * (5 + i % 2) for i in range(40)]
    tpuflow.train(Net(), [(rows, labels)])


@mistake(DataError, "data: inputs/0", "an Image", "np.stack(samples)")
def pictures_that_are_no_arrays():
    from PIL import Image

    pictures = [Image.new("L", (28 + i, 28)) for i in range(8)]
    tpuflow.train(Net(), [(pictures, labels[:8])])


@mistake(DataError, "inputs", "object", "np.stack(samples)")
def arrays_of_objects():
    rows = np.array([inputs[0], inputs[1, :5]] * 20, dtype=object)
    tpuflow.train(Net(), (rows, labels))


@mistake(DataError, "inputs", "meta tensor", "Give what np.asarray takes")
def a_tensor_that_holds_no_numbers():
    import torch

    tpuflow.train(Net(), (torch.empty(40, 7, device="meta"), labels))


@mistake(DataError, "data", "TensorDataset", "DataLoader")
def a_dataset_of_pytorch_without_a_loader():
    import torch

    samples = torch.utils.data.TensorDataset(torch.tensor(inputs), torch.tensor(labels))
    tpuflow.train(Net(), samples)


@mistake(DataError, "data: labels", "a single number", "make arrays of all of them")
def samples_instead_of_batches():
    tpuflow.train(Net(), [(inputs[i], labels[i]) for i in range(40)])


@mistake(DataError, "data", "inputs have 0 samples", "give at least one")
def empty_arrays():
    tpuflow.train(Net(), (inputs[:0], labels[:0]))


@mistake(DataError, "data", "no batch", "at least one")
def an_empty_list():
    tpuflow.train(Net(), [])


@mistake(DataError, "data", "no batch", "at least one")
def a_function_that_gives_nothing():
    tpuflow.train(Net(), lambda: iter(()))


@mistake(DataError, "data", "gave a NoneType", "return one, or yield batches")
def a_function_that_returns_nothing():
    def batches():
        [(inputs[:8], labels[:8])]

    tpuflow.train(Net(), batches)


@mistake(DataError, "eval_data", "no batch", "at least one")
def an_evaluation_of_nothing():
    tpuflow.train(Net(), (inputs, labels), eval_data=[])


@mistake(DataError, "epoch 2", "no batch", "a function that makes a new iterator")
def a_generator_for_two_epochs():
    batches = ((inputs[i : i + 8], labels[i : i + 8]) for i in range(0, 40, 8))
    tpuflow.train(Net(), batches, epochs=2)


@mistake(DataError, "data", "labels 39", "equally many")
def one_label_too_few():
    tpuflow.train(Net(), (inputs, labels[:-1]))


@mistake(DataError, "data", "labels 7", "equally many")
def one_label_too_few_in_a_batch():
    tpuflow.train(Net(), [(inputs[:8], labels[:7])])


@mistake(DataError, "sample 0", "is 3", "give labels - 1")
def labels_that_count_from_one():
    tpuflow.train(Net(), (inputs, 3 - labels))


@mistake(DataError, "sample 7", "is -1", "Leave such samples out")
def a_label_below_zero():
    missing = labels.copy()
    missing[7] = -1
    tpuflow.train(Net(), (inputs, missing))


@mistake(DataError, "eval_data: the label of sample 1", "is 3", "Give the model at least 5 outputs")
def a_label_out_of_range_in_the_evaluation():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, labels + 2))


@mistake(DataError, "sample 9", "is 5", "Give the model at least 6 outputs")
def a_label_out_of_range_on_the_way():
    wrong = labels.copy()
    wrong[9] = 5
    batches = [(inputs[:8], labels[:8]), (inputs[8:16], wrong[8:16])]
    tpuflow.train(Net(), batches, sink_size=0)


@mistake(DataError, "labels", "int32[32, 3]", "argmax")
def one_hot_labels_of_integers():
    one_hot = np.eye(3, dtype=np.int32)[labels]
    tpuflow.train(Net(), (inputs, one_hot))


@mistake(DataError, "softmax_cross_entropy", "float32[32, 3]", "argmax")
def one_hot_labels_for_softmax():
    one_hot = np.eye(3, dtype=np.float32)[labels]
    tpuflow.train(Net(), (inputs, one_hot), loss="softmax_cross_entropy")


@mistake(DataError, "softmax_cross_entropy", "float32[32]", "astype")
def class_numbers_as_floats_for_softmax():
    tpuflow.train(Net(), (inputs, labels.astype(np.float32)), loss="softmax_cross_entropy")


@mistake(DataError, "chosen by the floating-point labels", "float32[32]", "labels.astype(np.int32)")
def class_numbers_as_floats():
    tpuflow.train(Net(), (inputs, labels.astype(np.float32)))


@mistake(DataError, "data: loss", "int32[32, 1]", "labels[..., 0]")
def labels_in_a_column():
    tpuflow.train(Net(), (inputs, labels[:, None]))


@mistake(DataError, "'mse'", "int32[32]", "choose loss='softmax_cross_entropy'")
def class_numbers_for_mse():
    tpuflow.train(Net(), (inputs, labels), loss="mse")


@mistake(DataError, "'mse'", "float32[32]", "labels[..., None]")
def targets_without_the_outputs_axis():
    tpuflow.train(nn.Dense(1), (inputs, inputs[:, 0]))


@mistake(DataError, "chosen by the boolean labels", "bool[32]", "labels.astype(np.int32)")
def truth_values_as_labels():
    tpuflow.train(Net(), (inputs, labels > 0))


@mistake(DataError, "data: inputs float32[32]", "have shape [3]", "inputs[:, None]")
def inputs_without_features():
    tpuflow.train(Net(), (inputs[:, 0], labels))


@mistake(DataError, "data: inputs", "float32[32, 0]", "give every axis at least one")
def inputs_with_no_features_left():
    tpuflow.train(Net(), (inputs[:, 7:], labels))


@mistake(DataError, "eval_data", "float32[32, 5]", "Give inputs of a shape")
def an_evaluation_of_other_features():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs[:, :5], labels))


@mistake(DataError, "eval_data", "float32[32, 3]", "np.argmax(labels, axis=-1)")
def an_evaluation_with_other_labels():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, np.eye(3)[labels]))


@mistake(DataError, "train_step", "inputs float32[8, 5], labels int32[8]", "Give batches of one form")
def a_batch_of_other_features_on_the_way():
    batches = [(inputs[:8], labels[:8]), (inputs[8:16, :5], labels[8:16])]
    tpuflow.train(Net(), batches, sink_size=0)
