"""The Acme A1 as a Cardan platform: probing and capabilities; nothing here touches the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan import platform as seam
from cardan.platform import Capability, Evidence, Feature, Support


def _native(reason: str) -> Capability:
    return Capability(Support.NATIVE, reason, Evidence.SIMULATOR)


def _lacking(reason: str, alternative: str) -> Capability:
    return Capability(Support.UNSUPPORTED, reason, Evidence.SIMULATOR, alternative)


BY_OPS = ("sampling", "penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar_mask")
BY_RUNNER = ("host_logits", "hidden_states", "input_embeds")
FEATURES = {
    "dtype:float32": _native("the only type that the A1 computes in"),
    "kv_dtype:float32": _native("one array for keys and one for values per layer"),
    "attention:acme": _native("keys and values gathered by slot"),
    "weights:Q8_0": _native("blocks stay as they are in memory and are widened as they are used"),
    Feature.SLIDING_WINDOW: _native("masked"),
    Feature.ATTENTION_SOFTCAP: _native("on written-out scores"),
    Feature.ATTENTION_SINKS: _native("an extra column of the softmax"),
    Feature.MIXED_BATCH: _native("rows are attended to one by one"),
    Feature.GRAPH: _lacking("the A1 has nothing to capture", "Steps run eagerly"),
    Feature.OVERLAP: _lacking("the A1 computes while it is called", "The plain loop runs instead"),
    Feature.TENSOR_PARALLEL: _lacking("there is one A1 in a machine", "Pass --tp-size 1"),
    **{feature: _native("by the neutral runner, over the ops table") for feature in BY_OPS},
    **{feature: _native("by the neutral runner") for feature in BY_RUNNER},
}


class AcmePlatform(seam.Platform):
    """One Acme A1."""

    name = "acme"
    api_range = (1, 1)

    def probe(self) -> seam.Availability:
        """A real one would look for its driver. With a score of 0 it is chosen only when it is named."""
        return seam.Availability(0, "the A1 is computed in numpy, which is always there")

    def devices(self) -> tuple[seam.DeviceInfo, ...]:
        return (seam.DeviceInfo(index=0, name="Acme A1", detail="imaginary"),)

    def capabilities(self, device: seam.DeviceInfo) -> seam.Capabilities:
        return seam.Capabilities(FEATURES, page_sizes=(1, 16, 64))

    def open(self, device: seam.DeviceInfo, options: Mapping[str, Any]) -> seam.OpsDevice:
        from acme_cardan.device import AcmeDevice

        return AcmeDevice(device)


platform = AcmePlatform()
