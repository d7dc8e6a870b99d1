"""The parity tests can fail: taking one setting away from a model changes its logits by far more than they allow."""

from __future__ import annotations

import numpy as np
import pytest
from reference_forward import model_logits, read_folder, tensor_info
from tiny_models import make_tiny

from cardan.models import build_model

IDS = np.random.default_rng(40).integers(3, 97, 40).tolist()

CHANGES = [
    ("llama", "llama3", {"rope_parameters": {"rope_theta": 1e4}}),
    ("llama", "linear", {"rope_parameters": {"rope_theta": 1e4}}),
    ("llama", "yarn", {"rope_parameters": {"rope_theta": 1e4}}),
    ("llama", "theta", {"rope_parameters": {"rope_theta": 1e4}}),
    ("llama", "gelu", {"hidden_act": "silu"}),
    ("llama", None, {"rms_norm_eps": 1e-2}),
    ("mistral", "window", {"sliding_window": 6}),
    ("mistral", "window", {"sliding_window": None}),
    ("qwen2", "window", {"layer_types": None, "max_window_layers": 0}),
    ("qwen3", "window", {"use_sliding_window": False}),
    ("gemma2", None, {"query_pre_attn_scalar": 16}),
    ("gemma2", None, {"layer_types": ["full_attention"] * 3}),
    ("gemma2", "hard_softcaps", {"attn_logit_softcapping": None}),
    ("gemma2", "hard_softcaps", {"final_logit_softcapping": None}),
    ("gemma2", None, {"cardan_norm_offset": 0.0}),
    ("gemma3", None, {"sliding_window": 7}),
    ("gemma3", "linear", {"rope_parameters": None}),
    ("phi3", "longrope_long", {"original_max_position_embeddings": 48}),
    ("phi3", "longrope_short", {"rope_parameters": {"rope_theta": 1e4}}),
    ("granite", None, {"embedding_multiplier": 1.0}),
    ("granite", None, {"attention_multiplier": 1.0}),
    ("granite", None, {"residual_multiplier": 1.0}),
    ("granite", None, {"logits_scaling": 1.0}),
]


@pytest.mark.parametrize(("family", "variant", "changes"), CHANGES)
def test_setting_changes_the_logits(family, variant, changes, tmp_path):
    config, tensors = read_folder(make_tiny(family, tmp_path / "model", variant))
    assert any(config.get(key) != value for key, value in changes.items())
    logits = [
        model_logits(build_model(one, "tiny", tensor_info(tensors)), tensors, IDS)
        for one in (config, {**config, **changes})
    ]
    assert np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max() > 2e-3
