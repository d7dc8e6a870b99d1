"""The real SmolLM2: its file's exact weights through Cardan's model and through transformers'."""

from __future__ import annotations

import numpy as np
import pytest
from reference_forward import model_logits

from cardan.config import ModelConfig
from cardan.models import build_model
from cardan.weights import open_checkpoint

THE_CAPITAL_OF_FRANCE_IS = [504, 3575, 282, 4649, 314]
PARIS = 7042


@pytest.mark.model
def test_real_weights_agree_with_transformers(smollm2_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(ModelConfig(model=str(smollm2_path)))
    model = build_model(checkpoint.config, checkpoint.name, checkpoint.tensor_info())
    tensors = {name: checkpoint.dequantize(checkpoint.tensor(name)) for name in model.expected_tensors()}
    assert model.unused_tensors() == ()

    config = LlamaConfig(**checkpoint.config, attn_implementation="eager")
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.load_state_dict({name: torch.tensor(values) for name, values in tensors.items()}, strict=False, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    with torch.no_grad():
        want = theirs.eval()(torch.tensor([THE_CAPITAL_OF_FRANCE_IS])).logits[0].numpy()

    got = model_logits(model, tensors, THE_CAPITAL_OF_FRANCE_IS, "float32")
    assert (np.abs(got - want).max(axis=-1) / np.abs(want).max(axis=-1)).max() < 2e-4
    assert got[-1].argmax() == PARIS
    checkpoint.close()
