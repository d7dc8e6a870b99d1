"""SmolLM2 in several encodings of the same weights: their order and verdicts, and numbers next to those of others.

transformers and llama.cpp read the same files, and what they say is summed up here by the definitions.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from weight_variants import write_variant

from cardan.accuracy.cases import Case
from cardan.accuracy.comparison import Comparison, compare
from cardan.accuracy.golden import Golden
from cardan.accuracy.recording import Wanted, record, tokenizer_for
from cardan.accuracy.verdict import Verdict
from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig

TEXT = Path(__file__).parents[2] / "LICENSE"
"""A text that comes with the sources and stays as it is."""
POSITIONS = 80
TOP = 64
CONTEXT = 512
CHUNKS = 3
"""Of the text, each read by itself: the first half of it is context, the rest is scored."""
LLAMA = "peers/llama.cpp/build/bin/llama-perplexity"


def config_of(model: Path, tokenizer: Path, dtype: str, chunk: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), tokenizer=str(tokenizer), dtype=dtype),  # type: ignore[arg-type]
        platform=PlatformConfig(platform="cpu"),
        cache=CacheConfig(max_total_tokens=4096),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, random_seed=1),
    )


class Variants:
    """The model by the format of its weights: files, and records by the type of activations, each made once."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._made: dict[tuple[object, ...], Golden] = {}

    def file(self, fmt: str) -> Path:
        path = self._folder / f"SmolLM2-135M.{fmt}.gguf"
        return path if path.is_file() else write_variant(self._source, path, fmt)

    def record(self, fmt: str, dtype: str, chunk: int = 64, noise: bool = True) -> Golden:
        key = (fmt, dtype, chunk, noise)
        if key not in self._made:
            wanted = Wanted(positions=POSITIONS, top=TOP, layers=False, semantics=False, noise=noise, greedy=noise)
            self._made[key] = record(config_of(self.file(fmt), self._source, dtype, chunk), wanted)
        return self._made[key]


@pytest.fixture(scope="module")
def variants(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(smollm2_path, tmp_path_factory.mktemp("variants"))


Property = Callable[[str, object], None]


@pytest.mark.model
@pytest.mark.accuracy
@pytest.mark.timeout(1800)
def test_encodings_are_in_order_of_what_they_lose(variants: Variants, record_property: Property) -> None:
    truth = variants.record("F32", "float32")
    sides: dict[str, Comparison] = {
        "float32": compare(truth, variants.record("F32", "float32", chunk=48, noise=False)),
        "bfloat16": compare(truth, variants.record("F32", "bfloat16")),
        "Q8_0": compare(truth, variants.record("Q8_0", "bfloat16")),
        "Q4_0": compare(truth, variants.record("Q4_0", "bfloat16")),
    }
    means = [compared.all_positions.mean.value for compared in sides.values()]
    for name, mean in zip(sides, means, strict=True):
        record_property(f"mean KL of {name}", mean)
    assert means == sorted(means)
    assert means[0] < means[1] / 1000
    assert {name: compared.judgement.verdict for name, compared in sides.items()} == {
        "float32": Verdict.SAME,
        "bfloat16": Verdict.SAME,
        "Q8_0": Verdict.DRIFT,
        "Q4_0": Verdict.DIFFERENT,
    }


@functools.cache
def logprobs_by_transformers(path: Path, sequences: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Float64 ``[ids, vocab]`` of each sequence; transformers widens the file's blocks itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    loader = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy() for ids in sequences]


def truncated_kl(p: np.ndarray, q: np.ndarray) -> float:
    """Over the tokens that are among the ``TOP`` of both, and all others as one."""
    shared = np.intersect1d(np.argsort(-p)[:TOP], np.argsort(-q)[:TOP])
    a, b = np.exp(p[shared]), np.exp(q[shared])
    a, b = (np.append(side, 1 - side.sum()) for side in (a, b))
    return float((a * np.log(a / b)).sum())


@pytest.mark.model
@pytest.mark.accuracy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_0"])
def test_divergence_and_perplexity_are_those_of_transformers_logits(
    fmt: str, variants: Variants, record_property: Property
) -> None:
    sides = [variants.record(name, "float32", noise=False) for name in ("F32", fmt)]
    compared = compare(*sides)
    sequences = tuple(entry.case.ids[:-1] for entry in sides[0].cases)
    logprobs = [logprobs_by_transformers(variants.file(name), sequences) for name in ("F32", fmt)]
    values, own = [], []
    for entry, p, q in zip(sides[0].cases, *logprobs, strict=True):
        ids, start = entry.case.ids, entry.case.score_from
        for place in range(start, len(ids)):
            values.append(truncated_kl(p[place - 1], q[place - 1]))
            own.append((p[place - 1, ids[place]], q[place - 1, ids[place]]))
    mean = float(np.mean(values))
    ours, theirs = (float(value) for value in np.exp(-np.mean(own, axis=0)))
    found = compared.all_positions.mean.value, compared.perplexities.ours, compared.perplexities.theirs
    record_property("KL, perplexities", found)
    record_property("the same by transformers", (mean, ours, theirs))
    assert mean > 1e-4
    assert found == pytest.approx((mean, ours, theirs), rel=1e-3)


def llama_perplexity(model: Path, text: Path) -> float:
    """What llama.cpp's tool says of the first chunks of a text.

    It tokenizes the whole text, puts a BOS at the front of each chunk only where the model wants one, empties its
    cache before each, and scores the second half of each but for the last token's successor.
    """
    tool = Path(os.environ.get("CARDAN_CACHE", Path(__file__).parents[2] / ".cardan")) / LLAMA
    if not tool.is_file():
        pytest.skip(f"{tool} is not there; make accuracy-peers builds it")
    sizes = {"-c": CONTEXT, "-b": CONTEXT, "--chunks": CHUNKS, "-t": 1}
    flags = [str(part) for pair in sizes.items() for part in pair]
    done = subprocess.run(
        [str(tool), "-m", str(model), "-f", str(text), *flags], capture_output=True, text=True, timeout=900, check=False
    )
    said = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    assert said, (done.stdout + done.stderr)[-2000:]
    return float(said[1])


@pytest.mark.model
@pytest.mark.peers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_is_that_of_llama_cpp(dtype: str, smollm2_path: Path, record_property: Property) -> None:
    """The same file, context and stride, and no BOS, since this model's tokenizer adds none."""
    config = config_of(smollm2_path, smollm2_path, dtype, CONTEXT)
    tokenizer = tokenizer_for(config, required=True)
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    assert ids == tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    chunks = [tuple(ids[start : start + CONTEXT]) for start in range(0, CHUNKS * CONTEXT, CONTEXT)]
    cases = tuple(
        Case(name=str(number), ids=chunk, num_prompt=CONTEXT - 1, score_from=CONTEXT // 2 + 1)
        for number, chunk in enumerate(chunks)
    )
    wanted = Wanted(cases=cases, top=1, layers=False, semantics=False, noise=False, greedy=False)
    golden = record(config, wanted)
    logprobs = np.concatenate([entry.scores.logprobs for entry in golden.cases]).astype(np.float64)
    assert len(logprobs) == CHUNKS * (CONTEXT // 2 - 1)
    ours, theirs = float(np.exp(-logprobs.mean())), llama_perplexity(smollm2_path, TEXT)
    record_property("perplexity", ours)
    record_property("perplexity by llama.cpp", theirs)
    assert ours == pytest.approx(theirs, rel=0.01)
