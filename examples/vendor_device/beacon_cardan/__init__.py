"""The Beacon B1 as a Cardan platform of level 1: probing and capabilities."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cardan import platform as seam
from cardan.platform import Capability, Evidence, Feature, Support


def _lacking(what: str, alternative: str) -> Capability:
    return Capability(Support.UNSUPPORTED, what, Evidence.SIMULATOR, alternative)


NATIVE = Capability(Support.NATIVE, "compiled in", Evidence.SIMULATOR)
GREEDY = "the B1's program ends in an argmax"
FEATURES = {
    "dtype:float32": NATIVE,
    "kv_dtype:float32": NATIVE,
    Feature.MIXED_BATCH: NATIVE,
    Feature.SLIDING_WINDOW: _lacking("the compiler knows full attention only", "Choose a model without windows"),
    Feature.ATTENTION_SOFTCAP: _lacking("the compiler knows plain scores only", "Choose a model without soft-caps"),
    Feature.ATTENTION_SINKS: _lacking("the compiler knows no sinks", "Choose a model without sinks"),
    Feature.SAMPLING: _lacking(GREEDY, "Pass temperature 0."),
    Feature.PENALTIES: _lacking(GREEDY, "Drop the penalties."),
    Feature.LOGIT_BIAS: _lacking(GREEDY, "Drop logit_bias and min_new_tokens."),
    Feature.HOST_LOGITS: _lacking("logits never leave the chip", "Drop custom_logit_processor."),
    Feature.LOGPROBS: _lacking("logits never leave the chip", "Drop the logprobs."),
    Feature.PROMPT_LOGPROBS: _lacking("logits never leave the chip", "Drop the logprobs."),
    Feature.GRAMMAR_MASK: _lacking(GREEDY, "Run without a grammar."),
    Feature.HIDDEN_STATES: _lacking("hidden states never leave the chip", "Drop return_hidden_states."),
    Feature.INPUT_EMBEDS: _lacking("the program begins at token ids", "Send text or input_ids."),
    Feature.GRAPH: _lacking("programs are compiled when a model is loaded", "Drop the flag"),
    Feature.OVERLAP: _lacking("the B1 answers at once", "The plain loop runs instead"),
    Feature.TENSOR_PARALLEL: _lacking("there is one B1 in a machine", "Pass --tp-size 1"),
}


class BeaconPlatform(seam.Platform):
    """One Beacon B1."""

    name = "beacon"
    api_range = (1, 1)
    numbers: Mapping[str, int] = MappingProxyType({})

    def probe(self) -> seam.Availability:
        """Chosen only when it is named."""
        return seam.Availability(0, "the B1 is computed in numpy, which is always there")

    def devices(self) -> tuple[seam.DeviceInfo, ...]:
        return (seam.DeviceInfo(index=0, name="Beacon B1", detail="imaginary"),)

    def capabilities(self, device: seam.DeviceInfo) -> seam.Capabilities:
        return seam.Capabilities(FEATURES, page_sizes=(1,))

    def tuner(self, device: seam.DeviceInfo) -> seam.Tuner:
        """The head is multiplied in pieces, and how large they should be depends on the host."""
        from beacon_cardan.tuning import BeaconTuner

        return BeaconTuner()

    def tuned(self, numbers: Mapping[str, int]) -> BeaconPlatform:
        chosen = copy.copy(self)
        chosen.numbers = numbers
        return chosen

    def open(self, device: seam.DeviceInfo, options: Mapping[str, Any]) -> seam.Device:
        from beacon_cardan.device import BeaconDevice

        return BeaconDevice(device, **self.numbers)


platform = BeaconPlatform()
