"""What made a record: tokenizer, weights, formats, types, plan, capabilities and versions, each so that it compares.

It knows no scores. Weights are summed up tensor by tensor, so that one changed block is found and named.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform as machine
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from cardan import __version__
from cardan.platform import Capabilities, Plan
from cardan.platform.report import plan_to_json
from cardan.text.tokenizer import Tokenizer
from cardan.weights import OpenedCheckpoint

Progress = Callable[[str, int, int], None]
VALUES_UP_TO = 4 * 2**30
"""Bytes of weights up to which their values are summed up as well as their encodings."""
_TABLES = ("formats", "weights", "settings", "capabilities", "versions")
_PROBE = "The quick brown fox: 0123456789, naïve café — 你好, мир!\n\tdef f(x): return x**2  # ok"


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """One tensor of a checkpoint.

    Attributes:
        fmt: how it is encoded.
        shape: its sizes.
        encoded: checksum of its bytes as they are loaded.
        values: checksum of the float32 values that they stand for, or empty where that was left out.
    """

    fmt: str
    shape: tuple[int, ...]
    encoded: str
    values: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that made a record.

    Attributes:
        source: ``cardan``, ``transformers`` or ``openai``.
        platform: name of the platform, or of the server.
        device: what its maker calls the device.
        model: short name of the model.
        architecture: as in its config.
        vocab_size: columns of the logits; 0 where unknown.
        dtype: of the activations; empty where unknown.
        kv_dtype: of the KV cache; empty where unknown.
        formats: tensors of each format of the checkpoint.
        tokenizer: checksum of what it makes of texts; empty where there is none.
        weights: by name of the tensor.
        settings: the plan, ``{name: [value, source]}``.
        capabilities: by feature: native, emulated or unsupported.
        versions: of what computed.
    """

    source: str
    platform: str
    device: str
    model: str
    architecture: str
    vocab_size: int
    dtype: str
    kv_dtype: str = ""
    formats: Mapping[str, int] = field(default_factory=dict)
    tokenizer: str = ""
    weights: Mapping[str, TensorPrint] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fingerprint:
        """From what ``to_json`` gave.

        Raises:
            TypeError: a field is missing, unknown or of another type.
        """
        for item in fields(cls):
            kept, text = value.get(item.name), item.name not in (*_TABLES, "vocab_size")
            wanted = str if text else int if item.name == "vocab_size" else dict
            if item.name in value and not isinstance(kept, wanted):
                raise TypeError(f"{item.name} of its maker is {kept!r}")
        weights = {
            name: TensorPrint(item["fmt"], tuple(item["shape"]), item["encoded"], item["values"])
            for name, item in value["weights"].items()
        }
        return cls(**{**value, "weights": weights})

    @property
    def label(self) -> str:
        """Who it was, in a few words."""
        return f"{self.platform} ({self.dtype or 'unknown type'}, {self.model})"


def fingerprint(
    plan: Plan, capabilities: Capabilities, checkpoint: OpenedCheckpoint, tokenizer: Tokenizer | None, **more: Any
) -> Fingerprint:
    """The fingerprint of a prepared engine."""
    described = plan_to_json(plan)
    return Fingerprint(
        source="cardan",
        platform=plan.platform,
        device=f"{plan.device.name} {plan.device.detail}".strip(),
        model=plan.model.name,
        architecture=plan.model.architecture,
        vocab_size=plan.model.vocab_size,
        dtype=plan.dtype,
        kv_dtype=plan.kv_cache_dtype,
        formats=dict(plan.model.weight_formats),
        tokenizer="" if tokenizer is None else tokenizer_print(tokenizer),
        weights=weight_prints(checkpoint, more.get("progress")),
        settings={name: [item["value"], item["source"]] for name, item in described["settings"].items()}
        | {f"option {name}": [value, "platform"] for name, value in described["platform_options"].items()},
        capabilities={str(name): answer.support.value for name, answer in capabilities.features.items()},
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Of Cardan, Python, numpy and every distribution whose name begins with cardan."""
    found = {"cardan": __version__, "python": machine.python_version(), "numpy": np.__version__}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"]).lower()
        if name.startswith("cardan-"):
            found[name] = distribution.version
    return found


def tokenizer_print(tokenizer: Tokenizer) -> str:
    """A checksum of a probe text's ids and of the bytes of every token."""
    digest = hashlib.sha256(json.dumps(tokenizer.encode(_PROBE)).encode())
    for token in range(tokenizer.vocab_size):
        digest.update(token.to_bytes(4, "little") + tokenizer.token_bytes(token))
    return digest.hexdigest()[:32]


def weight_prints(checkpoint: OpenedCheckpoint, progress: Progress | None = None) -> dict[str, TensorPrint]:
    """Checksums of all tensors; of their values too where the whole is no larger than ``VALUES_UP_TO``."""
    info = checkpoint.tensor_info()
    total = sum(checkpoint.num_bytes(name) for name in info)
    found, done = {}, 0
    for name, (fmt, shape) in info.items():
        view = checkpoint.tensor(name)
        values = _digest(checkpoint.dequantize(view).data) if total <= VALUES_UP_TO else ""
        found[name] = TensorPrint(fmt, tuple(shape), _digest(view.data), values)
        done += checkpoint.num_bytes(name)
        if progress is not None:
            progress("checksums", done, total)
    return found


def _digest(data: memoryview) -> str:
    return hashlib.blake2b(data.cast("B") if data.contiguous else data.tobytes(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which two fingerprints differ.

    Attributes:
        what: what differs.
        ours: on the first side.
        theirs: on the second.
        weighs: whether it makes other numbers likely, as weights do and versions do not.
    """

    what: str
    ours: str
    theirs: str
    weighs: bool

    def describe(self) -> str:
        """As a line."""
        return f"{self.what}: {self.ours} against {self.theirs}"


_PLAIN = ("architecture", "vocab_size", "tokenizer", "dtype", "kv_dtype")
_SETTINGS = ("quantization", "context_length")


def compare_fingerprints(a: Fingerprint, b: Fingerprint) -> tuple[Difference, ...]:
    """Differences, those that weigh first; what one side does not know is no difference."""
    found = []
    for name in _PLAIN:
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours and theirs and ours != theirs:
            found.append(Difference(name, str(ours), str(theirs), weighs=True))
    found += _weight_differences(a.weights, b.weights)
    for name in sorted({*a.settings, *b.settings} - {"random_seed", "max_total_tokens"}):
        if name in a.settings and name in b.settings and a.settings[name][0] != b.settings[name][0]:
            ours, theirs = a.settings[name][0], b.settings[name][0]
            if name not in ("dtype", "kv_cache_dtype"):
                found.append(Difference(f"setting {name}", str(ours), str(theirs), weighs=name in _SETTINGS))
    for name in ("platform", "device", "source"):
        if getattr(a, name) != getattr(b, name):
            found.append(Difference(name, getattr(a, name), getattr(b, name), weighs=False))
    for name in sorted({*a.versions} & {*b.versions}):
        if a.versions[name] != b.versions[name]:
            found.append(Difference(f"version of {name}", a.versions[name], b.versions[name], weighs=False))
    return tuple(sorted(found, key=lambda difference: not difference.weighs))


def _weight_differences(a: Mapping[str, TensorPrint], b: Mapping[str, TensorPrint]) -> list[Difference]:
    """Missing tensors and changed ones; another encoding of the same values is said, and weighs nothing."""
    if not a or not b:
        return []
    found = []
    missing = sorted({*a} ^ {*b})
    if missing:
        found.append(Difference(f"tensors on one side only ({len(missing)})", missing[0], "absent", weighs=True))
    changed: list[str] = []
    recoded: list[str] = []
    for name in sorted({*a} & {*b}):
        ours, theirs = a[name], b[name]
        if ours.encoded == theirs.encoded and ours.fmt == theirs.fmt:
            continue
        same = bool(ours.values) and ours.values == theirs.values
        (recoded if same else changed).append(name)
    if changed:
        found.append(_of_tensors("weights", changed, a, b, weighs=True))
    if recoded:
        found.append(_of_tensors("encoding of the same weights", recoded, a, b, weighs=False))
    return found


def _of_tensors(
    what: str, names: list[str], a: Mapping[str, TensorPrint], b: Mapping[str, TensorPrint], *, weighs: bool
) -> Difference:
    first = names[0]
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Difference(
        f"{what} of {first}{others}",
        f"{a[first].fmt} {a[first].encoded[:8]}",
        f"{b[first].fmt} {b[first].encoded[:8]}",
        weighs=weighs,
    )
