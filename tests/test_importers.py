"""PyTorch weights become Flax variables that compute the same thing, and every misfit is named."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn
from jax import numpy as jnp

from models.mlp import MLP, TORCH_LAYERS
from tpuflow.errors import WeightsError
from tpuflow.examples.exported import TORCH_SEED0
from tpuflow.importers import Flattened, flax_params, load_state_dict, save_state_dict, state_dict
from train.export_torch import torch_mlp

RANDOM = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


class Network(nn.Module):
    """Convolution, batch norm, flatten, dense."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), padding="VALID", name="conv")(x)
        x = nn.BatchNorm(use_running_average=True, epsilon=1e-5, name="norm")(x)
        return nn.Dense(5, name="head")(x.reshape(x.shape[0], -1))


NETWORK_MAPPING = {"features.0": "conv", "features.1": "norm", "fc": Flattened("head", channels=4, height=6, width=5)}


def _network_like():
    return jax.eval_shape(Network().init, jax.random.key(0), jnp.zeros((1, 8, 7, 3)))


def _network_state() -> dict[str, np.ndarray]:
    return {
        "features.0.weight": _normal(4, 3, 3, 3),
        "features.0.bias": _normal(4),
        "features.1.weight": _normal(4),
        "features.1.bias": _normal(4),
        "features.1.running_mean": _normal(4),
        "features.1.running_var": np.abs(_normal(4)) + 1,
        "features.1.num_batches_tracked": np.asarray(7, np.int64),
        "fc.weight": _normal(5, 4 * 6 * 5),
        "fc.bias": _normal(5),
    }


def _mlp_like():
    return jax.eval_shape(MLP().init, jax.random.key(0), jnp.zeros((1, 28, 28)))


def test_a_linear_layer_is_transposed(torch_seed0):
    params = flax_params(torch_seed0, _mlp_like(), TORCH_LAYERS)["params"]
    np.testing.assert_array_equal(params["Dense_1"]["kernel"], torch_seed0["linear_relu_stack.2.weight"].T)
    np.testing.assert_array_equal(params["Dense_2"]["bias"], torch_seed0["linear_relu_stack.4.bias"])
    assert jax.tree.structure(params) == jax.tree.structure(_mlp_like()["params"])


def test_a_bare_tree_of_parameters_serves_as_well(torch_seed0):
    bare = flax_params(torch_seed0, _mlp_like()["params"], TORCH_LAYERS)
    np.testing.assert_array_equal(bare["Dense_0"]["kernel"], torch_seed0["linear_relu_stack.0.weight"].T)


def test_equal_names_need_no_mapping():
    like = {"params": {"block": {"fc": {"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}}}}
    state = {"block.fc.weight": _normal(2, 3), "block.fc.bias": _normal(2)}
    np.testing.assert_array_equal(flax_params(state, like)["params"]["block"]["fc"]["kernel"], state["block.fc.weight"].T)


def test_an_embedding_and_a_norm_keep_their_axes():
    like = {"embed": {"embedding": np.zeros((7, 3), np.float32)}, "norm": {"scale": np.zeros(3, np.float32)}}
    state = {"embed.weight": _normal(7, 3), "norm.weight": _normal(3)}
    tree = flax_params(state, like)
    np.testing.assert_array_equal(tree["embed"]["embedding"], state["embed.weight"])
    np.testing.assert_array_equal(tree["norm"]["scale"], state["norm.weight"])


def test_parameters_take_the_type_of_the_flax_tree():
    like = {"fc": {"kernel": jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)}}
    assert flax_params({"fc.weight": _normal(2, 3).astype(np.float64)}, like)["fc"]["kernel"].dtype == ml_dtypes.bfloat16


def test_missing_left_over_and_misshapen_tensors_are_all_named():
    state = _network_state()
    del state["features.1.running_var"]
    state["fc.weight"] = _normal(6, 4 * 6 * 5)
    state["extra.weight"] = _normal(2)
    with pytest.raises(WeightsError) as caught:
        flax_params(state, _network_like(), NETWORK_MAPPING)
    text = str(caught.value)
    assert "batch_stats/norm/var (4,) needs features.1.running_var, which is missing" in text
    assert "fc.weight (6, 120) becomes (120, 6), but params/head/kernel is (120, 5)" in text
    assert "extra.weight (2,) has no place in the Flax tree" in text
    assert "num_batches_tracked" not in text


def test_a_mapping_that_names_no_tensor_is_an_error(torch_seed0):
    with pytest.raises(WeightsError, match=r"names stack\.0.*linear_relu_stack\.0"):
        flax_params(torch_seed0, _mlp_like(), {"stack.0": "Dense_0"})


def test_a_wrong_flatten_size_is_an_error_not_a_reshape():
    with pytest.raises(WeightsError, match=r"fc\.weight"):
        flax_params(_network_state(), _network_like(), {**NETWORK_MAPPING, "fc": Flattened("head", 4, 7, 5)})


def test_quantised_weights_are_refused():
    with pytest.raises(WeightsError, match="int8"):
        flax_params({"fc.weight": np.zeros((2, 3), np.int8)}, {"fc": {"kernel": np.zeros((3, 2), np.float32)}})


def test_npz_and_safetensors_files_hold_what_was_saved(tmp_path):
    state = {"a.weight": _normal(3, 2), "a.bias": _normal(3).astype(np.float16)}
    np.savez(tmp_path / "w.npz", allow_pickle=False, **state)
    safetensors.numpy.save_file(state, tmp_path / "w.safetensors")
    for name in ("w.npz", "w.safetensors"):
        loaded = load_state_dict(tmp_path / name)
        assert loaded.keys() == state.keys()
        for key, array in state.items():
            assert loaded[key].dtype == array.dtype
            np.testing.assert_array_equal(loaded[key], array)


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors", pytest.param("w.pt", marks=pytest.mark.torch)])
@pytest.mark.parametrize("damage", ["cut", "foreign", "empty"])
def test_a_damaged_file_is_a_clear_error(tmp_path, name, damage, request):
    state = {"a.weight": _normal(30, 20)}
    path = tmp_path / name
    savers = {
        "w.npz": lambda: np.savez(path, allow_pickle=False, **state),
        "w.safetensors": lambda: safetensors.numpy.save_file(state, path),
        "w.pt": lambda: _save_torch(request.getfixturevalue("torch"), state, path),
    }
    savers[name]()
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "foreign": b"this is not a file of weights, it is a sentence", "empty": b""}[damage])
    with pytest.raises(WeightsError, match=str(path)):
        load_state_dict(path)


def test_an_npz_file_with_pickled_objects_is_not_opened(tmp_path):
    np.savez(tmp_path / "w.npz", a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(WeightsError, match="plain arrays"):
        load_state_dict(tmp_path / "w.npz")


def test_a_missing_file_and_an_unknown_kind_are_clear_errors(tmp_path):
    with pytest.raises(WeightsError, match="no such file"):
        load_state_dict(tmp_path / "w.npz")
    with pytest.raises(WeightsError, match=r"'\.h5'.*\.safetensors"):
        load_state_dict(tmp_path / "w.h5")


def test_importing_the_importers_and_reading_npz_does_not_load_torch():
    program = f"""
import sys
from tpuflow.importers import load_state_dict
load_state_dict({str(TORCH_SEED0["mlp"])!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def _save_torch(torch, state, path):
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, path)


@pytest.mark.torch
def test_pt_files_are_read_bare_and_wrapped_with_bfloat16(torch, tmp_path):
    state = {"a.weight": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), "a.bias": torch.ones(2, requires_grad=True)}
    for content in (state, {"state_dict": state, "epoch": 3}):
        torch.save(content, tmp_path / "w.pt")
        loaded = load_state_dict(tmp_path / "w.pt")
        assert loaded["a.weight"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(loaded["a.weight"].astype(np.float32), np.arange(6.0).reshape(2, 3))
        np.testing.assert_array_equal(loaded["a.bias"], [1, 1])


@pytest.mark.torch
def test_a_pt_file_with_a_whole_module_is_read_without_running_it(torch, tmp_path):
    class Runs(torch.nn.Linear):
        def __setstate__(self, state):
            raise AssertionError("code of the file ran")

    Runs.__module__, Runs.__qualname__ = "tests.test_importers", "Runs"
    globals()["Runs"] = Runs
    module = torch.nn.Sequential(Runs(2, 3), torch.nn.BatchNorm1d(3))
    module[1].register_buffer("scratch", torch.ones(4), persistent=False)
    torch.save(module, tmp_path / "w.pt")
    torch.save({"epoch": 3, "ema": None, "model": module}, tmp_path / "wrapped.pt")
    for name in ("w.pt", "wrapped.pt"):
        loaded = load_state_dict(tmp_path / name)
        assert loaded.keys() == module.state_dict().keys()
        for key, tensor in module.state_dict().items():
            np.testing.assert_array_equal(loaded[key], tensor.numpy())


@pytest.mark.torch
def test_tensors_that_share_elements_are_views_of_them_and_stay_within(torch, tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    torch.save({"turned": whole.T[1:], "row": whole[2], "one": torch.ones(1).expand(5), "empty": torch.zeros(0, 3)}, tmp_path / "w.pt")
    loaded = load_state_dict(tmp_path / "w.pt")
    np.testing.assert_array_equal(loaded["turned"], whole.T[1:].numpy())
    np.testing.assert_array_equal(loaded["row"], [8, 9, 10, 11])
    assert loaded["one"].tolist() == [1.0] * 5 and loaded["empty"].shape == (0, 3)


PERSISTENT = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
"""A storage of four numbers in f32, as a pickle refers to it."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ctorch._utils\n_rebuild_tensor_v2\n(" + PERSISTENT + b"K\x00(K\x09t(K\x01t\x89)tR.", r"reaches beyond its storage of 4"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(" + PERSISTENT + b"K\x00(J\xff\xff\xff\x7ft(K\x00t\x89)tR.", "claim to hold arrays of"),
        (b"cposix\nsystem\n(X\x04\x00\x00\x00exittR.", "refused: reading it would call posix.system"),
        (b"cbuiltins\ngetattr\n(cos\nenviron\nX\x03\x00\x00\x00gettR.", "refused: reading it would call builtins.getattr"),
        (b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.", "damaged, or not a file of PyTorch's"),
        (b"\x80\x02(X\x01", "damaged, or not a file of PyTorch's"),
    ],
    ids=["beyond", "inflated", "system", "getattr", "changes a class", "cut"],
)
def test_a_forged_pickle_is_refused_in_words(tmp_path, content, message):
    made = {
        "archive/data.pkl": b"\x80\x02}X\x01\x00\x00\x00w" + content.removeprefix(b"\x80\x02")[:-1] + b"s.",
        "archive/data/0": bytes(16),
    }
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        for name, data in made.items():
            archive.writestr(name, data)
    with pytest.raises(WeightsError, match=message):
        load_state_dict(tmp_path / "w.pt")


@pytest.mark.torch
def test_a_training_checkpoint_without_a_state_dict_says_what_to_save(torch, tmp_path):
    torch.save({"epoch": 3, "weight": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match=r"epoch.*torch\.save\(model\.state_dict"):
        load_state_dict(tmp_path / "w.pt")


@pytest.mark.torch
def test_the_exported_weights_are_those_of_seed_0(torch, torch_seed0):
    for name, tensor in torch_mlp().state_dict().items():
        np.testing.assert_array_equal(torch_seed0[name], tensor.numpy())


@pytest.mark.torch
def test_a_converted_convolution_network_computes_what_pytorch_computes(torch):
    state = _network_state()
    reference = torch.nn.Module()
    reference.features = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    reference.fc = torch.nn.Linear(4 * 6 * 5, 5)
    reference.load_state_dict({name: torch.from_numpy(np.asarray(array)) for name, array in state.items()})
    reference.eval()
    images = _normal(2, 3, 8, 7)
    with torch.no_grad():
        expected = reference.fc(reference.features(torch.from_numpy(images)).flatten(1)).numpy()
    variables = flax_params(state, _network_like(), NETWORK_MAPPING)
    ours = Network().apply(variables, images.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4)  # sums of 120 products of order one, in another order


# --- patterns of names --------------------------------------------------------------------------------------------------

PATTERNS = {
    "[outer.]words": "words",
    "[outer.]h.*.fc": "h_*/fc",
    "[outer.]h.*.conv1d.weight": "h_*/conv1d/kernel",
    "[outer.]h.*.conv1d.bias": "h_*/conv1d/bias",
    "[outer.]h.*.experts.*.up": "h_*/experts/up",
    "head.weight": "words/embedding",
    "[outer.]h.*.mask": None,
}


def _pattern_variables(*, stacked: bool = False) -> dict:
    """Two layers, written out or along a leading axis."""

    def layer() -> dict:
        return {
            "fc": {"kernel": _normal(3, 2), "bias": _normal(2)},
            "conv1d": {"kernel": _normal(3, 4), "bias": _normal(4)},
            "experts": {"up": {"kernel": _normal(5, 3, 2)}},
        }

    layers = [layer(), layer()]
    rest = {"words": {"embedding": _normal(7, 3)}}
    return {**rest, "h": jax.tree.map(lambda *a: np.stack(a), *layers)} if stacked else {**rest, "h_0": layers[0], "h_1": layers[1]}


def _stacked(mapping: dict) -> dict:
    return {name: place and place.replace("h_*", "h") for name, place in mapping.items()}


def test_stars_stand_for_numbers_and_become_leading_axes_where_the_flax_side_lacks_them():
    apart = _pattern_variables()
    state = state_dict(apart, PATTERNS)
    assert state["outer.h.1.experts.4.up.weight"].shape == (2, 3)
    np.testing.assert_array_equal(state["outer.h.1.experts.4.up.weight"], apart["h_1"]["experts"]["up"]["kernel"][4].T)
    together = flax_params(state, _pattern_variables(stacked=True), _stacked(PATTERNS))
    np.testing.assert_array_equal(together["h"]["experts"]["up"]["kernel"][1], apart["h_1"]["experts"]["up"]["kernel"])
    again = state_dict(together, _stacked(PATTERNS))
    assert again.keys() == state.keys()
    assert all(np.array_equal(again[name], state[name]) for name in state)


def test_a_tensor_that_a_row_names_keeps_its_axes():
    variables = _pattern_variables()
    np.testing.assert_array_equal(state_dict(variables, PATTERNS)["outer.h.0.conv1d.weight"], variables["h_0"]["conv1d"]["kernel"])


@pytest.mark.parametrize("stacked", [False, True])
def test_a_state_dict_comes_back_whatever_may_be_missing_of_its_names(stacked):
    variables = _pattern_variables(stacked=stacked)
    mapping = _stacked(PATTERNS) if stacked else PATTERNS
    state = state_dict(variables, mapping)
    assert "head.weight" not in state
    short = {name.removeprefix("outer."): array for name, array in state.items()}
    more = {**short, "h.0.mask": np.ones((2, 2)), "head.weight": short["words.weight"]}
    for given in (state, short, more):
        jax.tree.map(np.testing.assert_array_equal, flax_params(given, variables, mapping), variables)


@pytest.mark.parametrize("name", ["new", "old"])
def test_either_of_two_names_is_read_and_the_first_is_written(name):
    variables = {"params": {"layers_0": {"dense": {"kernel": _normal(3, 4), "bias": _normal(4)}}}}
    mapping = {"[model.]layers.*.{new|old}": "layers_*/dense"}
    written = state_dict(variables, mapping)
    assert set(written) == {"model.layers.0.new.weight", "model.layers.0.new.bias"}
    given = {tensor.replace("new", name): array for tensor, array in written.items()}
    jax.tree.map(np.testing.assert_array_equal, flax_params(given, variables, mapping), variables)
    with pytest.raises(WeightsError, match="model.layers.1.old.bias .* has no place"):
        flax_params({**given, "model.layers.1.old.bias": _normal(4)}, variables, mapping)


def test_a_layer_that_is_missing_from_a_stack_and_one_too_many_are_named():
    variables = _pattern_variables(stacked=True)
    state = state_dict(variables, _stacked(PATTERNS))
    state["outer.h.2.fc.weight"] = state.pop("outer.h.1.fc.weight")
    with pytest.raises(WeightsError) as caught:
        flax_params(state, variables, _stacked(PATTERNS))
    assert "h/fc/kernel (2, 3, 2) needs outer.h.1.fc.weight, which is missing" in str(caught.value)
    assert "outer.h.2.fc.weight (2, 3) has no place in the Flax tree" in str(caught.value)


def test_convolutions_and_flattened_images_go_back_as_they_came():
    state = _network_state()
    back = state_dict(flax_params(state, _network_like(), NETWORK_MAPPING), NETWORK_MAPPING)
    assert back.keys() == state.keys() - {"features.1.num_batches_tracked"}
    assert all(np.array_equal(back[name], state[name]) for name in back)


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors", pytest.param("w.bin", marks=pytest.mark.torch)])
def test_a_written_file_is_read_as_it_was_and_appears_whole_or_not_at_all(tmp_path, name):
    state = {"a.weight": _normal(3, 2), "a.bias": _normal(3)}
    save_state_dict(tmp_path / name, state)
    read = load_state_dict(tmp_path / name)
    assert all(np.array_equal(read[key], state[key]) for key in state) and read.keys() == state.keys()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(WeightsError, match="cannot be written"):
        save_state_dict(tmp_path / "missing" / name, state)
    with pytest.raises(WeightsError, match=r"'\.h5'"):
        save_state_dict(tmp_path / "w.h5", state)
