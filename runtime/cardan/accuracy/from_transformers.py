"""Makes a golden record with Hugging Face transformers, so that the truth need not be Cardan's.

It knows no platform of Cardan's. transformers and the library that it computes with are imported when it runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform as machine
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case, check_cases
from cardan.accuracy.fingerprints import Fingerprint, tokenizer_print
from cardan.accuracy.golden import Golden, Recorded
from cardan.accuracy.recording import Wanted, make_cases, text_of, tokenizer_for
from cardan.accuracy.scores import Greedy, from_logits
from cardan.accuracy.session import Progress
from cardan.config import EngineConfig
from cardan.engine.model_files import open_weightless
from cardan.errors import ConfigError, ModelError
from cardan.types import Float32Array

DTYPES = ("float32", "bfloat16", "float16")


class _Model:
    """A model of transformers' with logits as numpy."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._library = _require()
        options: dict[str, Any] = {"dtype": dtype}
        folder = path
        if path.suffix == ".gguf":
            folder, options["gguf_file"] = path.parent, path.name
        try:
            model = self._library.AutoModelForCausalLM.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"transformers does not load {path}: {error}") from error
        self.model = model.eval().requires_grad_(False)
        self.model.generation_config = self._library.GenerationConfig()

    def logits(self, ids: Sequence[int]) -> Float32Array:
        """Float32 ``[len(ids), vocab]``."""
        batch = self._library.BatchEncoding({"input_ids": [list(ids)]}, tensor_type="pt")
        return np.asarray(self.model(**batch).logits[0].float().numpy(), dtype=np.float32)

    def greedy(self, ids: Sequence[int], count: int) -> Greedy:
        """What it goes on with."""
        batch = self._library.BatchEncoding(
            {"input_ids": [list(ids)], "attention_mask": [[1] * len(ids)]}, tensor_type="pt"
        )
        # a config of its own: neither ends of sequence nor penalties of the model's
        plain = self._library.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        text = self.model.generate(**batch, generation_config=plain)[0, len(ids) :].tolist()
        scores = from_logits(self.logits([*ids, *text])[len(ids) - 1 : -1], text, 2)
        return Greedy(
            ids=np.asarray(text, np.int32),
            logprobs=scores.logprobs,
            margins=scores.top_logprobs[:, 0] - scores.top_logprobs[:, 1],
        )


def _require() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"--from transformers needs transformers and torch, which cannot be imported ({error}). "
            "Install them: pip install transformers torch"
        ) from error


def record_transformers(config: EngineConfig, wanted: Wanted, progress: Progress | None = None) -> Golden:
    """A record made by transformers: one forward pass over each whole sequence, and greedy text with its own cache.

    Args:
        config: names model and type; the rest is Cardan's and plays no part.
        wanted: what is measured; layers and noise are not to be had.
        progress: told how far it is.

    Raises:
        ConfigError: transformers is not installed, or a sequence does not fit the model.
        ModelError: there is no such model, or transformers does not load it.
    """
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    tokenizer = tokenizer_for(config, required=wanted.cases is None)
    description = open_weightless(config.model)
    made = _Model(description.path, dtype)
    settings = made.model.config
    vocab_size = int(settings.vocab_size)
    cases = check_cases(make_cases(wanted, tokenizer), vocab_size, int(settings.max_position_embeddings))
    recorded = []
    done, total = 0, sum(case.num_positions for case in cases)
    for case in cases:
        recorded.append(_record(made, case, min(wanted.top, vocab_size), wanted.greedy, tokenizer))
        done += case.num_positions
        if progress is not None:
            progress("positions", done, total)
    architecture = (getattr(settings, "architectures", None) or [type(made.model).__name__])[0]
    return Golden(
        fingerprint=Fingerprint(
            source="transformers",
            platform="transformers",
            device=str(made.model.device),
            model=description.name,
            architecture=str(architecture),
            vocab_size=vocab_size,
            dtype=dtype,
            tokenizer="" if tokenizer is None else tokenizer_print(tokenizer),
            versions={
                "python": machine.python_version(),
                **{name: importlib.metadata.version(name) for name in ("transformers", "torch")},
            },
        ),
        cases=tuple(recorded),
        notes=("made by transformers: one pass over each sequence; it has neither layers nor a noise floor",),
    )


def _record(made: _Model, case: Case, top: int, greedy: bool, tokenizer: Any) -> Recorded:
    logits = made.logits(case.ids[:-1])
    free = made.greedy(case.ids[: case.num_prompt], case.greedy_tokens) if greedy else None
    scores = from_logits(logits[case.score_from - 1 :], case.ids[case.score_from :], top)
    scores.check(case.name)
    return Recorded(
        case=case,
        text=text_of(tokenizer, case.ids),
        scores=scores,
        greedy=free,
        greedy_text=text_of(tokenizer, () if free is None else free.ids.tolist()),
    )
