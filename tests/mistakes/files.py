"""Callbacks, checkpoints, parameters, and other files."""

from __future__ import annotations

import os

import flax.linen as nn
import jax
import numpy as np

import tpuflow
from tests.mistakes.setting import Net, inputs, labels
from tests.mistakes.table import mistake
from tpuflow.errors import CheckpointError, ConfigError, ProgramFileError, WeightsError


@mistake(ConfigError, "callbacks", "LossMonitor", "[")
def a_callback_outside_of_a_list():
    tpuflow.train(Net(), (inputs, labels), callbacks=tpuflow.LossMonitor())


@mistake(ConfigError, "callbacks", "the class LossMonitor", "LossMonitor(...)")
def the_class_of_a_callback():
    tpuflow.train(Net(), (inputs, labels), callbacks=[tpuflow.LossMonitor])


@mistake(ConfigError, "callbacks", "print", "derive a class")
def a_function_as_callback():
    tpuflow.train(Net(), (inputs, labels), callbacks=[print])


@mistake(ConfigError, "callbacks", "on_epoch_ends", "Did you mean 'on_epoch_end'?")
def a_misspelt_hook():
    class Stop(tpuflow.Callback):
        def on_epoch_ends(self, run):
            run.stop = True

    tpuflow.train(Net(), (inputs, labels), callbacks=[Stop()])


@mistake(ConfigError, "callbacks", "on_train_batch_end", "Did you mean 'on_step_end'?")
def a_hook_of_another_framework():
    class Stop(tpuflow.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print(logs)

    tpuflow.train(Net(), (inputs, labels), callbacks=[Stop()])


@mistake(ConfigError, "Stop.on_epoch_end", "missing a required argument: 'logs'", "(self, run)")
def a_hook_of_other_arguments():
    class Stop(tpuflow.Callback):
        def on_epoch_end(self, epoch, logs):
            print(logs)

    tpuflow.train(Net(), (inputs, labels), callbacks=[Stop()])


@mistake(ConfigError, "LossMonitor", "0", "at least 1")
def the_loss_of_every_zeroth_step():
    tpuflow.LossMonitor(0)


@mistake(ConfigError, "every_steps", "0", "at least 1")
def a_checkpoint_after_every_zero_steps():
    tpuflow.ModelCheckpoint("run", every_steps=0)


@mistake(ConfigError, "EarlyStopping", "'acuracy'", "there are: accuracy, avg_loss, loss")
def stopping_at_a_metric_that_is_not_measured():
    stop = tpuflow.EarlyStopping("acuracy")
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, labels), callbacks=[stop])


@mistake(ConfigError, "EarlyStopping", "eval_data", "give eval_data")
def stopping_without_an_evaluation():
    tpuflow.train(Net(), (inputs, labels), callbacks=[tpuflow.EarlyStopping("accuracy")])


@mistake(ConfigError, "EarlyStopping", "'lowest'", "min")
def an_unknown_mode_of_stopping():
    tpuflow.EarlyStopping("accuracy", mode="lowest")


@mistake(ConfigError, "run.save", "within its on_checkpoint", "call it in on_checkpoint")
def a_checkpoint_outside_of_a_training():
    tpuflow.Run(epochs=1, steps_per_epoch=1, batch_size=1, policy="fp32").save("run")


@mistake(RuntimeWarning, "resume", "'chekpoints'", "Did you mean 'checkpoints'?")
def a_misspelt_path_to_resume_from():
    os.makedirs("checkpoints")
    tpuflow.train(Net(), (inputs, labels), resume="chekpoints", progress=False)


@mistake(CheckpointError, "resume", "is a file", "directory")
def a_file_to_resume_from():
    open("model.pt", "w").close()
    tpuflow.train(Net(), (inputs, labels), resume="model.pt")


@mistake(ConfigError, "resume", "got True", "expected a path")
def a_switch_instead_of_a_path():
    tpuflow.train(Net(), (inputs, labels), resume=True)


@mistake(WeightsError, "runs/best", "no such file or folder", "Give a checkpoint")
def parameters_that_are_not_there():
    os.makedirs("runs")
    tpuflow.train(Net(), (inputs, labels), params="runs/best")


@mistake(WeightsError, "mnsit.npz", "no such file or folder", "Did you mean 'mnist.npz'?")
def a_misspelt_file_of_parameters():
    np.savez("mnist.npz", w=inputs)
    tpuflow.load_params("mnsit.npz", like={"w": inputs})


@mistake(WeightsError, "model.h5", "'.h5'", "Save the weights as one of these")
def parameters_of_an_unknown_kind():
    open("model.h5", "w").close()
    tpuflow.load_params("model.h5", like={"w": inputs})


@mistake(WeightsError, "weights.npz", "File is not a zip file", "Write it again")
def parameters_that_are_damaged():
    open("weights.npz", "w").close()
    tpuflow.load_params("weights.npz", like={"w": inputs})


@mistake(WeightsError, "runs", "it holds nothing", "Give a directory that tpuflow.ModelCheckpoint wrote in")
def a_folder_that_holds_no_checkpoint():
    os.makedirs("runs")
    tpuflow.load_params("runs", like={"w": inputs})


@mistake(ConfigError, "params", "missing Dense_0/bias", "skip_mismatched=True")
def parameters_of_another_model():
    other = nn.Dense(3).init(jax.random.key(0), inputs)
    tpuflow.train(Net(), (inputs, labels), params=other)


@mistake(ConfigError, "Dense_0/kernel", "[7, 8], the model's has [7, 16]", "skip_mismatched=True")
def parameters_of_another_width():
    params = Net().init(jax.random.key(0), inputs)["params"]
    params["Dense_0"]["kernel"] = np.zeros((7, 8), np.float32)
    tpuflow.train(Net(), (inputs, labels), params=params)


@mistake(ConfigError, "params", "missing Dense_0/bias", "Give the parameters of this model")
def parameters_as_one_array():
    tpuflow.train(Net(), (inputs, labels), params=inputs)


@mistake(ConfigError, "chip file", "missing.toml", "readable TOML file")
def a_chip_of_ones_own_that_is_not_there():
    tpuflow.get_chip("missing.toml")


@mistake(ConfigError, "mine.toml", "'coers'", "Did you mean 'cores'?")
def a_chip_of_ones_own_with_a_misspelt_field():
    with open("mine.toml", "w") as file:
        file.write('base = "generic"\ncoers = 4\n')
    tpuflow.get_chip("mine.toml")


@mistake(ProgramFileError, "step.tpx", "b'TPX'", "give a .tpx file as tpuflow saves it")
def a_program_that_is_damaged():
    with open("step.tpx", "wb") as file:
        file.write(b"TPX")
    tpuflow.Executable.load("step.tpx")
