"""RoPE scalings against transformers' frequencies, in every spelling that configs use."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference_forward import reference_logits
from tiny_models import make_tiny, transformers_logits

from cardan.errors import ModelConfigError
from cardan.models.fields import ConfigFields
from cardan.models.rope import RopeReader

HEAD_DIM, LENGTH = 64, 1024
PAIRS = HEAD_DIM // 2

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn_odd": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": np.linspace(1.0, 2.0, PAIRS).tolist(),
        "long_factor": np.linspace(1.0, 30.0, PAIRS).tolist(),
        "original_max_position_embeddings": 256,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "short_factor": np.linspace(1.0, 2.0, PAIRS).tolist(),
        "long_factor": np.linspace(1.0, 30.0, PAIRS).tolist(),
        "original_max_position_embeddings": 256,
        "factor": 16.0,
    },
}


def read(config: dict, **arguments):
    values = {"max_position_embeddings": LENGTH, **config}
    return RopeReader(fields=ConfigFields(values), head_dim=HEAD_DIM, context_length=LENGTH).read(**arguments)


def frequencies(config: dict, context_length: int):
    rope = read(config)
    return rope.scaling.scale(rope.base, context_length)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("context_length", [200, 5000])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_agree_with_transformers(name, context_length, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**SCALINGS[name], "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=LENGTH, rope_parameters=dict(parameters)
    )
    kind = parameters["rope_type"]
    if kind == "default":
        module = LlamaRotaryEmbedding(config)
        want, want_factor = module.inv_freq, module.attention_scaling
    else:
        want, want_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=context_length)
    got, got_factor = frequencies({"rope_parameters": parameters}, context_length)
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-6)
    assert got_factor == pytest.approx(want_factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_spelling_give_the_same_table(name):
    new = read({"rope_parameters": {**SCALINGS[name], "rope_theta": 5e5, "partial_rotary_factor": 1.0}}).table(300)
    kind = SCALINGS[name]["rope_type"]
    old_group = {**{key: value for key, value in SCALINGS[name].items() if key != "rope_type"}, "type": kind}
    old = read({"rope_theta": 5e5, "rope_scaling": old_group}).table(300)
    np.testing.assert_array_equal(old.cos, new.cos)
    np.testing.assert_array_equal(old.sin, new.sin)


def test_table_is_the_cosine_of_position_times_frequency():
    table = read({"rope_theta": 10000.0}).table(5000)
    assert table.cos.shape == table.sin.shape == (5000, PAIRS)
    assert table.cos.dtype == table.sin.dtype == np.float32
    assert (table.rotary_dim, table.interleaved) == (HEAD_DIM, False)
    angle = 4999 * 10000.0 ** (-2 * 7 / HEAD_DIM)
    assert table.cos[4999, 7] == pytest.approx(np.cos(angle), abs=1e-7)
    assert table.sin[4999, 7] == pytest.approx(np.sin(angle), abs=1e-7)


def test_attention_factor_is_in_the_table():
    table = read({"rope_parameters": {**SCALINGS["yarn_odd"], "rope_theta": 1e4}}).table(2)
    np.testing.assert_allclose(table.cos[0], 1.25)


def test_longrope_takes_the_factors_of_the_context_it_serves():
    config = {"rope_parameters": {**SCALINGS["longrope"], "rope_theta": 1e4}}
    assert frequencies(config, 256)[0][-1] / frequencies(config, 257)[0][-1] == pytest.approx(15.0)


def test_phi3_keeps_the_original_length_beside_the_group():
    group = {**SCALINGS["longrope"], "original_max_position_embeddings": 9999}
    config = {"rope_scaling": group, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    np.testing.assert_array_equal(
        frequencies(config, 300)[0], frequencies({"rope_scaling": SCALINGS["longrope"], "rope_theta": 1e4}, 300)[0]
    )


def test_su_is_longrope():
    config = {"rope_scaling": {**SCALINGS["longrope"], "rope_type": None, "type": "su"}, "rope_theta": 1e4}
    assert read(config) == read({"rope_scaling": SCALINGS["longrope"], "rope_theta": 1e4})


def test_explicit_factors_divide_the_frequencies_and_win():
    factors = np.linspace(1.0, 8.0, PAIRS).tolist()
    got, factor = frequencies({"cardan_rope_factors": factors, "rope_scaling": SCALINGS["linear"]}, 100)
    np.testing.assert_allclose(got, frequencies({}, 100)[0] / factors)
    assert factor == 1.0


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_partial_rotation(place):
    config = {"partial_rotary_factor": 0.75}
    rope = read(config if place == "outside" else {"rope_parameters": {"rope_theta": 1e4, **config}})
    assert rope.table(4).rotary_dim == 48


def test_partial_rotation_survives_the_rounding_of_its_factor():
    fields = ConfigFields({"partial_rotary_factor": 0.58})  # 0.58 * 100 is just below 58
    assert RopeReader(fields=fields, head_dim=100, context_length=8).read().base.rotary_dim == 58


def test_nested_parameters_by_layer_type():
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert read(config, layer_type="full_attention").base.theta == 1e6
    assert read(config, layer_type="sliding_attention", scaled=False).base.theta == 1e4
    assert read(config).base.theta == 1e6


OLD = {
    "gemma3": (
        "linear",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "llama": (
        "llama3",
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "phi3": (
        "longrope_partial",
        {
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0]},
        },
    ),
}


@pytest.mark.parametrize("family", OLD)
def test_whole_models_in_the_old_spelling(family, tmp_path):
    variant, spelling = OLD[family]
    folder = make_tiny(family, tmp_path / "model", variant)
    ids = list(range(5, 35))
    want = reference_logits(folder, ids)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, **spelling}))
    np.testing.assert_allclose(reference_logits(folder, ids), want, rtol=1e-12)
    theirs = transformers_logits(folder, ids)
    assert np.abs(theirs - want).max() / np.abs(want).max() < 2e-4


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"rope_type": "ntk"}, r"rope_scaling.rope_type = 'ntk', expected one of default, linear, dynamic, llama3, ya"),
        ({"type": "linear"}, r"has no rope_scaling.factor; expected a number above 0. Correct it in the model's conf"),
        ({"type": "linear", "factor": "2"}, r"rope_scaling.factor = '2', expected a number above 0"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            r"high_freq_factor = 4, expected a number above low_freq_factor = 4",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * PAIRS},
            r"short_factor = \[1.0\], expected a list of 32 numbers \(got 1\)",
        ),
        ({"rope_type": "yarn", "factor": 2, "truncate": "no"}, r"truncate = 'no', expected true or false"),
        (
            {"partial_rotary_factor": 0.3},
            r"partial_rotary_factor = 0.3, expected a part of head_dim = 64 that is an ev",
        ),
    ],
)
def test_wrong_groups_are_refused(group, message):
    with pytest.raises(ModelConfigError, match=message):
        read({"rope_scaling": group})


def test_dynamic_needs_two_pairs():
    with pytest.raises(ModelConfigError, match=r"'dynamic' needs more than one rotated pair"):
        read({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 2 / HEAD_DIM})


def test_a_group_that_is_no_object_is_refused():
    with pytest.raises(ModelConfigError, match=r"rope_scaling = 'linear', expected an object"):
        read({"rope_scaling": "linear"})
