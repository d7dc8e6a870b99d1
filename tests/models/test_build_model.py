"""Models are built from configs and names of tensors, and what does not fit is refused with a message that helps."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference_forward import model_logits, read_folder, reference_logits, tensor_info
from tiny_models import ALL_MODELS, CONTEXT, SIZES, VOCAB, make_tiny

from cardan.errors import CheckpointError, ConfigError, ModelConfigError, UnsupportedModelError
from cardan.models import MODEL_FAMILIES, build_model, register_model
from cardan.platform import ParameterKind, Shard
from cardan.types import KVKind

LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
IDS = list(range(3, 25))


def build(tensors=None, architecture="LlamaForCausalLM", **changes):
    config = {**LLAMA, "architectures": [architecture], **changes}
    return build_model({key: value for key, value in config.items() if value is not ...}, "tiny", tensors)


def tensors_of(model, fmt="F32"):
    return {name: (fmt, shape) for name, shape in model.expected_tensors().items()}


@pytest.mark.parametrize(("family", "variant"), ALL_MODELS)
def test_expected_tensors_are_those_that_transformers_writes(family, variant, tmp_path):
    config, tensors = read_folder(make_tiny(family, tmp_path / "model", variant))
    model = build_model(config, "tiny", tensor_info(tensors))
    written = {name: tensor.shape for name, tensor in tensors.items() if "vision" not in name and "multi_" not in name}
    assert model.expected_tensors() == written
    assert set(model.unused_tensors()) == tensors.keys() - written.keys()
    assert model.facts.num_parameters == sum(tensors[name].size for name in written)


def test_facts():
    model = build(tensors_of(build()), dtype="bfloat16")
    facts = model.facts
    assert (facts.name, facts.architecture, facts.family) == ("tiny", "LlamaForCausalLM", "llama")
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (2, 48, 80)
    assert (facts.vocab_size, facts.context_length, facts.native_dtype) == (VOCAB, CONTEXT, "bfloat16")
    assert facts.num_parameters == 2 * VOCAB * 48 + 2 * (48 * (48 + 24 + 24 + 48) + 3 * 48 * 80 + 2 * 48) + 48
    assert facts.weight_bytes == 4 * facts.num_parameters
    assert facts.weight_formats == {"F32": 2 * 9 + 3}
    layer = facts.layers[1]
    assert (layer.index, layer.group, layer.kind) == (1, 0, KVKind.FULL)
    assert (layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim) == (4, 2, 12, 12)
    assert (layer.scale, layer.window, layer.softcap) == (12**-0.5, None, None)


@pytest.mark.parametrize(
    ("config", "fmt", "dtype"),
    [
        ({"torch_dtype": "float16"}, "F32", "float16"),
        ({}, "F32", "float32"),
        ({}, "BF16", "bfloat16"),
        ({}, "F16", "float16"),
        ({"torch_dtype": "auto"}, "F32", "float32"),
    ],
)
def test_native_dtype(config, fmt, dtype):
    assert build(tensors_of(build(), fmt), **config).facts.native_dtype == dtype


def test_quantized_weights_name_no_dtype():
    tensors = tensors_of(build(hidden_size=64))
    tensors["lm_head.weight"] = ("Q8_0", (VOCAB, 64))
    facts = build(tensors, hidden_size=64).facts
    assert facts.native_dtype == "bfloat16"
    assert facts.weight_formats["Q8_0"] == 1
    assert facts.weight_bytes == 4 * (facts.num_parameters - VOCAB * 64) + VOCAB * 64 // 32 * 34


def test_yarn_stretches_the_context():
    group = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
    assert build(rope_scaling=group, rope_theta=1e4).facts.context_length == 4 * CONTEXT
    assert build(rope_scaling={"type": "linear", "factor": 4.0}).facts.context_length == CONTEXT


def test_parameters_are_named_shaped_and_split():
    model = build()
    by_name = {parameter.name: parameter for parameter in model.parameters()}
    assert list(by_name)[:8] == [
        "embed",
        *(f"layers.0.{key}" for key in ("input_norm", "qkv", "o", "mlp_norm", "gate_up", "down")),
        "layers.1.input_norm",
    ]
    assert list(by_name)[-2:] == ["norm", "head"]
    qkv = by_name["layers.0.qkv"]
    assert qkv.shape == (48 + 24 + 24, 48)
    assert [source.tensor.split(".")[-2] for source in qkv.sources] == ["q_proj", "k_proj", "v_proj"]
    assert by_name["embed"].kind is ParameterKind.EMBEDDING
    assert by_name["norm"].kind is ParameterKind.VECTOR
    shards = {key: by_name[key].shard for key in ("embed", "layers.0.qkv", "layers.0.o", "norm", "head")}
    assert list(shards.values()) == [Shard.VOCAB, Shard.COLUMN, Shard.ROW, Shard.NONE, Shard.VOCAB]


def test_weights_of_several_formats_are_not_fused(tmp_path):
    folder = make_tiny("llama", tmp_path / "model", "biases")
    config, tensors = read_folder(folder)
    info = tensor_info(tensors)
    for name in ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        info[name] = ("F16", info[name][1])
    model = build_model(config, "tiny", info)
    names = [parameter.name for parameter in model.parameters()]
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate_up", "layers.1.qkv", "layers.1.gate"} < set(names)
    np.testing.assert_allclose(model_logits(model, tensors, IDS), reference_logits(folder, IDS), rtol=1e-9, atol=1e-12)


def test_a_config_that_does_not_say_is_tied_where_there_is_no_head():
    untied = build(tie_word_embeddings=False)
    with_head = tensors_of(untied)
    without = {name: info for name, info in with_head.items() if name != "lm_head.weight"}
    assert build(without, tie_word_embeddings=...).parameters()[-1].tied_to == "embed"
    assert build(with_head, tie_word_embeddings=...).parameters()[-1].tied_to is None
    assert build(with_head, tie_word_embeddings=True).parameters()[-1].tied_to == "embed"
    assert build(with_head, tie_word_embeddings=True).unused_tensors() == ()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 21 tensors .*: lm_head.weight\. Check that all files"):
        build(without)


def test_unused_tensors_are_listed_but_for_harmless_ones():
    tensors = tensors_of(build())
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (6,)),
        "rope_freqs.weight": ("F32", (6,)),
        "model.layers.0.self_attn.q_norm.weight": ("F32", (12,)),
        "model.layers.2.input_layernorm.weight": ("F32", (48,)),
    }
    assert build({**tensors, **extra}).unused_tensors() == tuple(sorted(extra)[:1] + sorted(extra)[2:3])


def test_gemma_norms_add_one_unless_the_checkpoint_did():
    def offsets(**changes):
        model = build(architecture="Gemma3ForCausalLM", head_dim=16, **changes)
        return {parameter.add for parameter in model.parameters() if parameter.kind is ParameterKind.VECTOR}

    assert offsets() == {1.0}
    assert offsets(cardan_norm_offset=0.0) == {0.0}
    assert {parameter.add for parameter in build().parameters()} == {0.0}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_wrapped_gemma3_under_every_prefix(prefix, tmp_path):
    folder = make_tiny("gemma3_wrapped", tmp_path / "model")
    config, tensors = read_folder(folder)
    model = build_model(config, "tiny", tensor_info(tensors))
    stem = next(name for name in tensors if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    renamed = {name.replace(stem, prefix) if name.startswith(stem) else name: v for name, v in tensors.items()}
    other = build_model(config, "tiny", tensor_info(renamed))
    want = model_logits(model, tensors, IDS)
    np.testing.assert_array_equal(model_logits(other, renamed, IDS), want)


def test_wrapped_gemma3_fills_in_what_published_configs_leave_out():
    from transformers import Gemma3TextConfig

    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    facts = build_model(config, "gemma", None).facts
    theirs = Gemma3TextConfig(**text)
    assert (facts.vocab_size, facts.context_length) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert facts.layers[0].q_heads == theirs.num_attention_heads
    assert facts.layers[0].kv_heads == theirs.num_key_value_heads
    assert facts.layers[0].k_dim == theirs.head_dim
    assert [layer.window is not None for layer in facts.layers] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert facts.layers[0].scale == theirs.query_pre_attn_scalar**-0.5
    assert [layer.rope_id for layer in facts.layers[4:7]] == [1, 0, 1]


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3", "gemma3"])
def test_defaults_are_those_of_transformers(family, tmp_path):
    """Fields that a config leaves out mean what transformers takes them to mean."""
    from tiny_models import transformers_logits

    folder = make_tiny(family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    droppable = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}
    droppable |= {"layer_types", "rope_parameters", "hidden_act", "hidden_activation", "use_sliding_window"}
    short = {key: value for key, value in config.items() if key not in droppable}
    (folder / "config.json").write_text(json.dumps(short))
    want = transformers_logits(folder, IDS)
    assert np.abs(reference_logits(folder, IDS) - want).max() / np.abs(want).max() < 2e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": ...},
            r"config has no hidden_size; expected an integer of at least 1. Correct it in the model",
        ),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0, expected an integer of at least 1"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers = 10+, expected an integer of at most 4096"),
        ({"max_position_embeddings": 2**31}, r"= 2147483648, expected an integer of at most 2147483647"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps = 10+ …, expected a number of at most 3e\+38"),
        ({"vocab_size": "many"}, r"vocab_size = 'many', expected an integer"),
        ({"intermediate_size": True}, r"intermediate_size = True, expected an integer"),
        ({"num_attention_heads": 5}, r"num_key_value_heads = 2, expected a divisor of num_attention_heads = 5"),
        ({"hidden_size": 50}, r"hidden_size = 50, expected a multiple of num_attention_heads = 4, or a field head_dim"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps = 0, expected a number above 0"),
        ({"hidden_act": "relu"}, r"hidden_act = 'relu', expected one of silu, swish, gelu"),
        ({"attention_bias": "yes"}, r"attention_bias = 'yes', expected true or false"),
        ({"architectures": []}, r"config of tiny has architectures = \[\], expected a list such as .*Add it to config"),
    ],
)
def test_wrong_configs_are_refused(changes, message):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    with pytest.raises(ModelConfigError, match=message):
        build_model(config, "tiny", None)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "Gemma2ForCausalLM",
            {"layer_types": ["full_attention"]},
            r"layer_types = \['full_attention'\], expected a list of 2 entries out of sliding_att.* \(got 1\)",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": 0},
            r"has no sliding_window; expected an integer",
        ),
        (
            "Gemma3ForCausalLM",
            {"use_bidirectional_attention": True},
            r"use_bidirectional_attention = True, expected False or no such field, because decoding is causal. Use",
        ),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, r"because Gemma 3 has no soft cap on scores"),
        ("Gemma3ForConditionalGeneration", {}, r"has no text_config; expected an object with the language model's"),
        ("GraniteForCausalLM", {"logits_scaling": 0.0}, r"logits_scaling = 0.0, expected a number above 0"),
    ],
)
def test_wrong_configs_of_other_families_are_refused(architecture, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        build(architecture=architecture, **changes)


def test_long_values_are_cut_in_messages():
    with pytest.raises(ModelConfigError) as caught:
        build(rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 500, "long_factor": [1.0] * 500})
    assert "(got 500)" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_tensors_of_another_shape_are_refused():
    tensors = tensors_of(build())
    tensors["model.embed_tokens.weight"] = ("F32", (VOCAB + 3, 48))
    with pytest.raises(
        CheckpointError,
        match=rf"Tensor model.embed_tokens.weight has shape \[{VOCAB + 3}, 48\], expected \[{VOCAB}, 48\] "
        r"\(vocab_size, hidden_size of the config\). Check that config.json belongs to these weights",
    ):
        build(tensors)


def test_missing_tensors_are_listed():
    tensors = {name: info for name, info in tensors_of(build()).items() if "layers.1." not in name}
    with pytest.raises(
        CheckpointError,
        match=r"lacks 9 of the 21 tensors that a llama model of this config has: model.layers.1.input_layernorm.weight"
        r".* …\. Check that all files of the checkpoint are there",
    ):
        build(tensors)


def test_unknown_architectures_list_the_known_ones():
    with pytest.raises(
        UnsupportedModelError,
        match=r"tiny has the architecture BertModel, which is not implemented; expected one of Gemma2ForCausalLM, .*"
        r"Choose another model, or install a plugin",
    ):
        build(architecture="BertModel")


def test_plugins_register_architectures_once(monkeypatch):
    monkeypatch.setattr("cardan.models.registry.MODEL_FAMILIES", dict(MODEL_FAMILIES))
    made = object()
    register_model("OtherForCausalLM", lambda config, name, tensors: made)
    assert build(architecture="OtherForCausalLM") is made
    with pytest.raises(
        ConfigError, match=r"registers the model architecture OtherForCausalLM, which is registered alre"
    ):
        register_model("OtherForCausalLM", lambda config, name, tensors: made)
