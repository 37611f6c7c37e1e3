"""Options of `tpuflow.train` that do not exist, do not fit, or are of another kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpuflow
from tests.mistakes.setting import Net, inputs, labels
from tests.mistakes.table import mistake
from tpuflow.errors import ConfigError


@mistake(ConfigError, "policy", "'mixd'", "Did you mean 'mixed'?")
def a_misspelt_policy():
    tpuflow.train(Net(), (inputs, labels), policy="mixd")


@mistake(ConfigError, "policy", "<class 'jax.numpy.float16'>", "Did you mean 'fp16'?")
def an_element_type_as_policy():
    tpuflow.train(Net(), (inputs, labels), policy=jnp.float16)


@mistake(ConfigError, "chip", "'bm1960'", "Did you mean 'bm1690'?")
def a_misspelt_chip():
    tpuflow.train(Net(), (inputs, labels), chip="bm1960")


@mistake(ConfigError, "loss", "'softmax_crossentropy'", "Did you mean 'softmax_cross_entropy'?")
def a_misspelt_loss():
    tpuflow.train(Net(), (inputs, labels), loss="softmax_crossentropy")


@mistake(ConfigError, "loss", "0.5", "Choose one of")
def a_number_as_loss():
    tpuflow.train(Net(), (inputs, labels), loss=0.5)


@mistake(ConfigError, "loss '<lambda>'", "takes 1 positional argument but 2 were given", "A loss takes (outputs, labels)")
def a_loss_of_one_argument():
    tpuflow.train(Net(), (inputs, labels), loss=lambda outputs: outputs.mean())


@mistake(ConfigError, "loss '<lambda>'", "it returned a tuple", "returns one number")
def a_loss_that_returns_a_pair():
    tpuflow.train(Net(), (inputs, labels), loss=lambda outputs, labels: (outputs.mean(), labels))


@mistake(ConfigError, "train.py:1", "outputs float32[32, 3] and labels int32[32]", "A loss takes (outputs, labels)")
def a_loss_that_breaks_on_the_shapes():
    tpuflow.train(Net(), (inputs, labels), loss=lambda outputs, labels: (outputs - labels) ** 2)


@mistake(ConfigError, "metric", "'acuracy'", "Did you mean 'accuracy'?")
def a_misspelt_metric():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, labels), metrics=["acuracy"])


@mistake(ConfigError, "metrics", "'accuracy'", "('accuracy', 'loss')")
def a_metric_outside_of_a_list():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, labels), metrics="accuracy")


@mistake(ConfigError, "metrics", "not given", "give eval_data")
def metrics_without_data_to_measure_on():
    tpuflow.train(Net(), (inputs, labels), metrics=["accuracy"])


@mistake(ConfigError, "'accuracy'", "'mse'", "choose other metrics")
def an_accuracy_of_real_numbers():
    targets = np.ones((40, 3), np.float32)
    tpuflow.train(Net(), (inputs, targets), eval_data=(inputs, targets), metrics=["accuracy"])


@mistake(ConfigError, "'top5'", "3", "5")
def the_best_five_of_three_classes():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, labels), metrics=["top5"])


@mistake(ConfigError, "engine", "'fats'", "Did you mean 'fast'?")
def a_misspelt_engine():
    tpuflow.train(Net(), (inputs, labels), engine="fats")


@mistake(ConfigError, "fidelity", "'exact'", "bitexact")
def a_fidelity_that_does_not_exist():
    tpuflow.train(Net(), (inputs, labels), fidelity="exact")


@mistake(ConfigError, "optimizer", "'adam'", "optax.adam")
def an_optimizer_by_name():
    tpuflow.train(Net(), (inputs, labels), optimizer="adam")


@mistake(ConfigError, "optimizer", "0.1", "optax.sgd")
def a_learning_rate_as_optimizer():
    tpuflow.train(Net(), (inputs, labels), optimizer=0.1)


@mistake(ConfigError, "optimizer", "adam", "optax.adam(")
def an_optimizer_that_was_not_called():
    tpuflow.train(Net(), (inputs, labels), optimizer=optax.adam)


@mistake(ConfigError, "optimizer", "schedule", "optax.sgd(")
def a_schedule_as_optimizer():
    tpuflow.train(Net(), (inputs, labels), optimizer=optax.cosine_decay_schedule(0.1, 100))


@mistake(ConfigError, "optimizer", "PyTorch optimizer SGD", "optax.sgd(1e-3)")
def an_optimizer_of_pytorch():
    import torch

    weights = [torch.nn.Parameter(torch.zeros(3))]
    tpuflow.train(Net(), (inputs, labels), optimizer=torch.optim.SGD(weights, lr=0.1))


@mistake(ConfigError, "optimizer", "a tuple", "pass the optimizer itself")
def the_state_of_an_optimizer_as_optimizer():
    state = optax.adam(1e-3).init({"w": jnp.zeros(3)})
    tpuflow.train(Net(), (inputs, labels), optimizer=state)


@mistake(ConfigError, "epochs", "0", "at least 1")
def no_epochs():
    tpuflow.train(Net(), (inputs, labels), epochs=0)


@mistake(ConfigError, "epochs", "'3'", "at least 1")
def a_string_as_number_of_epochs():
    tpuflow.train(Net(), (inputs, labels), epochs="3")


@mistake(ConfigError, "batch_size", "0", "at least 1")
def no_samples_in_a_batch():
    tpuflow.train(Net(), (inputs, labels), batch_size=0)


@mistake(ConfigError, "batch_size", "16.0", "at least 1")
def a_batch_size_that_is_no_whole_number():
    tpuflow.train(Net(), (inputs, labels), batch_size=16.0)


@mistake(ConfigError, "batch_size 64", "40 samples", "at most 40")
def a_batch_larger_than_the_data():
    tpuflow.train(Net(), (inputs, labels), batch_size=64)


@mistake(ConfigError, "sink_size", "-2", "-1")
def a_sink_size_below_minus_one():
    tpuflow.train(Net(), (inputs, labels), sink_size=-2)


@mistake(ConfigError, "accumulate_steps", "0", "at least 1")
def gradients_accumulated_over_no_steps():
    tpuflow.train(Net(), (inputs, labels), accumulate_steps=0)


@mistake(ConfigError, "eval_steps", "0", "at least 1")
def an_evaluation_after_every_zero_steps():
    tpuflow.train(Net(), (inputs, labels), eval_data=(inputs, labels), eval_steps=0)


@mistake(ConfigError, "eval_epochs", "no eval_data", "give eval_data")
def evaluations_without_data():
    tpuflow.train(Net(), (inputs, labels), eval_epochs=2)


@mistake(ConfigError, "seed", "'abc'", "whole number")
def a_word_as_seed():
    tpuflow.train(Net(), (inputs, labels), seed="abc")


@mistake(ConfigError, "seed", "key<fry>[]", "whole number")
def a_random_key_as_seed():
    tpuflow.train(Net(), (inputs, labels), seed=jax.random.key(0))


@mistake(ConfigError, "shuffle", "'no'", "True or False")
def a_word_as_switch():
    tpuflow.train(Net(), (inputs, labels), shuffle="no")


@mistake(ConfigError, "shuffle", "needs arrays", "shuffle in the loader")
def shuffling_of_batches_that_come_one_by_one():
    tpuflow.train(Net(), [(inputs, labels)], shuffle=True)


@mistake(ConfigError, "loss scale", "'dynamc'", "Did you mean 'dynamic'?")
def a_misspelt_loss_scale():
    tpuflow.train(Net(), (inputs, labels), "mixed", loss_scale="dynamc")


@mistake(ConfigError, "loss scale", "0.0", "positive")
def a_loss_scale_of_zero():
    tpuflow.train(Net(), (inputs, labels), "mixed", loss_scale=0)


@mistake(ConfigError, "'mixed'", "float16", "float32")
def batch_normalisation_in_half_precision_under_autocast():
    tpuflow.train(Net(), (inputs, labels), "mixed", keep_batchnorm_fp32=False)


@mistake(ConfigError, "json", "missing/out.json", "Give a path in an existing, writable folder")
def a_result_in_a_folder_that_does_not_exist():
    tpuflow.train(Net(), (inputs, labels), json="missing/out.json")


@mistake(ConfigError, "numerics", "-1", "at least 1")
def reports_of_numerics_after_every_minus_one_steps():
    tpuflow.train(Net(), (inputs, labels), numerics=-1)


@mistake(AttributeError, "'tpuflow'", "'trian'", "Did you mean 'train'?")
def a_misspelt_function():
    tpuflow.trian(Net(), (inputs, labels))


@mistake(ConfigError, "label_smoothing", "1.5", "below 1")
def more_than_the_whole_label_smoothed():
    tpuflow.cross_entropy(label_smoothing=1.5)


@mistake(ConfigError, "element type", "'fp16'", "float16")
def a_policy_of_ones_own_with_a_misspelt_type():
    tpuflow.Policy("mine", compute_dtype="fp16", casts="list")


@mistake(ConfigError, "ema", "eval_params", "give one of them")
def two_ways_of_saying_what_is_evaluated():
    tpuflow.train(Net(), (inputs, labels), ema=0.9, eval_params=lambda state, params: params)


@mistake(ConfigError, "kind of loss scale", "'dynamc'", "dynamic")
def a_loss_scale_of_an_unknown_kind():
    tpuflow.LossScale("dynamc")


@mistake(ConfigError, "policy", "'fp8'", "Choose one of")
def autocast_to_a_precision_that_does_not_exist():
    tpuflow.autocast(jnp.sin, "fp8")
