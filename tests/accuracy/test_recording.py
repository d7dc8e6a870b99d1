"""Records of engines: what is in them is the model's, through prefill, cached prefixes and forced decode steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cardan.accuracy.cases import Case, Text, bundled_texts, check_cases, limited, read_texts
from cardan.accuracy.container import read_container, write_container
from cardan.accuracy.golden import read_golden
from cardan.accuracy.recording import Wanted, record
from cardan.accuracy.scores import score_rows
from cardan.accuracy.session import Session
from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.errors import CardanError, ConfigError, GoldenFileError, UnsupportedError
from cardan.platform import Platform
from cardan.types import TokenLogprobs


def logprobs_of(model: Path, ids: tuple[int, ...]) -> np.ndarray:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()


def test_scores_are_transformers_logprobs(tiny_llama: Path, recorded, cases) -> None:
    golden = recorded()
    assert golden.top == 64
    for case, entry in zip(cases, golden.cases, strict=True):
        want = logprobs_of(tiny_llama, case.ids)[case.score_from - 1 : -1]
        assert entry.case == case
        targets = case.ids[case.score_from :]
        assert np.allclose(entry.scores.logprobs, want[np.arange(len(targets)), targets], atol=2e-5)
        assert np.allclose(entry.scores.top_logprobs, -np.sort(-want, axis=1)[:, :64], atol=2e-5)
        assert np.allclose(entry.scores.rest, np.log(np.exp(-np.sort(-want, axis=1)[:, 64:]).sum(axis=1)), atol=1e-3)


def test_greedy_text_is_the_models_own(tiny_llama: Path, recorded, cases) -> None:
    golden = recorded()
    case, entry = cases[3], golden.cases[3]
    ids = [*case.ids[: case.num_prompt], *entry.greedy.ids.tolist()]
    want = logprobs_of(tiny_llama, tuple(ids))[case.num_prompt - 1 : -1]
    assert entry.greedy.ids.tolist() == want.argmax(axis=1).tolist()
    ordered = np.sort(want, axis=1)
    assert np.allclose(entry.greedy.margins, ordered[:, -1] - ordered[:, -2], atol=2e-5)


def test_what_it_ran_through_is_said(recorded) -> None:
    golden = recorded()
    prefill = sum(entry.case.num_prefill for entry in golden.cases)
    decode = golden.num_positions - prefill
    assert golden.notes[0].startswith(f"{prefill} positions were scored in prefill and {decode} in decode steps; ")
    assert "19 tokens from cached prefixes" in golden.notes[0]


def test_a_file_brings_everything_back(recorded, tmp_path: Path) -> None:
    golden = recorded()
    path = tmp_path / "x.cardan"
    golden.write(path)
    found = read_golden(path)
    assert found.fingerprint == golden.fingerprint
    assert found.notes == golden.notes
    assert found.noise == golden.noise
    for mine, theirs in zip(golden.cases, found.cases, strict=True):
        assert mine.case == theirs.case
        for name in ("logprobs", "top_ids", "top_logprobs", "rest"):
            assert (getattr(mine.scores, name) == getattr(theirs.scores, name)).all()
        for name in ("ids", "logprobs", "margins"):
            assert (getattr(mine.greedy, name) == getattr(theirs.greedy, name)).all()
    for name in ("cases", "positions", "norms", "projections"):
        assert (getattr(golden.layers, name) == getattr(found.layers, name)).all()
    assert found.layers.taps == golden.layers.taps


def test_a_position_takes_no_more_than_a_kilobyte(recorded, tmp_path: Path) -> None:
    """Headers apart, which do not grow with positions."""
    golden = recorded()
    path = tmp_path / "x.cardan"
    golden.write(path)
    data = sum(array.nbytes for array in read_container(path).arrays.values())
    assert data <= 1024 * golden.num_positions


def test_a_file_that_lacks_something_is_refused(recorded, tmp_path: Path) -> None:
    path = tmp_path / "x.cardan"
    recorded().write(path)
    whole = read_container(path)
    write_container(path, {key: value for key, value in whole.header.items() if key != "noise"}, whole.arrays)
    with pytest.raises(GoldenFileError, match=r"lacks what a golden file of version 1 has .*noise.*Record it anew"):
        read_golden(path)
    write_container(path, {**whole.header, "cases": []}, whole.arrays)
    with pytest.raises(GoldenFileError, match=r"lacks what a golden file of version 1 has .*no prompts"):
        read_golden(path)
    write_container(path, {**whole.header, "cases": [5]}, whole.arrays)
    with pytest.raises(GoldenFileError, match="lacks what a golden file of version 1 has"):
        read_golden(path)


@pytest.mark.parametrize("name", ["logprobs", "rest", "top_logprobs"])
def test_what_is_no_number_is_never_the_same(name: str, recorded, tmp_path: Path) -> None:
    """NaN is neither within a band nor beyond it."""
    path = tmp_path / "x.cardan"
    recorded().write(path)
    whole = read_container(path)
    values = whole.arrays[name].copy()
    values[2] = np.nan
    write_container(path, whole.header, {**whole.arrays, name: values})
    with pytest.raises(GoldenFileError, match=r"cannot be compared\. Prompt .*: logprobs of 1 of .* are no finite"):
        read_golden(path)
    top = [(1, -0.1), (2, float("nan"))]
    entry = TokenLogprobs(logprob=-0.1, top=tuple(top))
    with pytest.raises(CardanError, match=r"logprobs of 1 of 1 positions are no finite .*try --dtype float32"):
        score_rows([entry], 1, "a")


def test_arrays_of_other_positions_are_refused(recorded, tmp_path: Path) -> None:
    path = tmp_path / "x.cardan"
    recorded().write(path)
    whole = read_container(path)
    write_container(path, whole.header, {**whole.arrays, "rest": whole.arrays["rest"][:-1]})
    with pytest.raises(GoldenFileError, match="the rest have different numbers of positions"):
        read_golden(path)


def test_whole_results_of_layers_are_kept_on_request(tiny_llama: Path, cases) -> None:
    import torch
    import transformers
    from accuracy_tiny import tiny_config

    wanted = Wanted(cases=cases[3:4], noise=False, whole=("norm",), semantics=False)
    golden = record(tiny_config(tiny_llama), wanted)
    model = transformers.AutoModel.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([cases[3].ids[:-1]])).last_hidden_state[0].numpy()
    assert np.allclose(golden.whole[f"{cases[3].name}/norm"], want, atol=1e-4)
    with pytest.raises(ConfigError, match=r"--whole-layer names 'absent', expected some of layers.0.input_norm"):
        record(tiny_config(tiny_llama), replace(wanted, whole=("absent",)))


def test_a_layer_that_is_not_there_is_refused_before_all_is_scored(
    tiny_llama: Path, cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accuracy_tiny import tiny_config

    def score(*_: object, **__: object) -> None:
        raise AssertionError("all was scored")

    monkeypatch.setattr("cardan.accuracy.recording.layer_results", lambda session, some: [{"norm": len(some)}])
    monkeypatch.setattr("cardan.accuracy.session.Run.score", score)
    with pytest.raises(ConfigError, match=r"--whole-layer names 'absent', expected some of norm\."):
        record(tiny_config(tiny_llama), Wanted(cases=cases, noise=False, whole=("absent",), semantics=False))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("noise", {"run again": {"mean": "much"}}),
        ("noise", {"run again": {}}),
        ("noise", [1]),
        ("semantics", {"temperature": {"name": "temperature", "support": "native", "p": "x"}}),
        ("semantics", [1]),
        ("fingerprint", {"settings": None}),
        ("fingerprint", {"vocab_size": "many"}),
        ("cases", {"wave": "late"}),
        ("cases", {"greedy": 10**6}),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_when_it_is_read(
    part: str, value: Any, recorded, tmp_path: Path
) -> None:
    path = tmp_path / "a.cardan"
    recorded(noise=False).write(path)
    kept = read_container(path)
    header: dict[str, Any] = json.loads(json.dumps(kept.header))
    if part == "cases":
        header["cases"][0] |= value
    else:
        header[part] = {**header[part], **value} if part == "fingerprint" else value
    write_container(path, header, kept.arrays)
    with pytest.raises(GoldenFileError, match="lacks what a golden file of version 1 has"):
        read_golden(path)


@pytest.mark.parametrize("wanted", [{"positions": 7}, {"positions": -1}, {"noise_positions": 7}])
def test_too_few_positions_are_refused_before_anything_starts(wanted: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=f"positions must be at least 8, got {next(iter(wanted.values()))}. Pass more"
    ):
        Wanted(**wanted)


def test_a_platform_without_logprobs_is_refused(tiny_llama: Path) -> None:
    class Silent:
        """The null platform without logprobs of prompts."""

        def __init__(self, platform: Platform) -> None:
            self._platform = platform

        def __getattr__(self, name: str) -> object:
            return getattr(self._platform, name)

        def configured(self, options: object) -> Silent:
            return self

        def capabilities(self, device: object) -> object:
            answers = self._platform.capabilities(device)
            left = {name: answer for name, answer in answers.features.items() if name != "prompt_logprobs"}
            return replace(answers, features=left)

    from cardan.testing.null_platform import platform

    config = EngineConfig(model=ModelConfig(model="null"), platform=PlatformConfig(platform="null"))
    with pytest.raises(UnsupportedError, match="does not support prompt_logprobs, which is needed to score prompts"):
        Session(config, platform=Silent(platform))  # type: ignore[arg-type]


def test_bundled_texts_have_lengths_chunks_and_shared_prefixes() -> None:
    texts = bundled_texts()
    cases = [text.case(lambda text: list(text.encode())) for text in texts]
    lengths = sorted(len(case.ids) for case in cases)
    assert lengths[0] < 64
    assert lengths[-1] > 1000
    late = [case for case in cases if case.wave]
    assert len(late) >= 2
    for case in late:
        assert case.score_from > 400
        assert any(other.ids[: case.score_from] == case.ids[: case.score_from] for other in cases if not other.wave)
    assert all(case.num_prompt < len(case.ids) for case in cases)


def test_sets_are_shortened_alike() -> None:
    cases = [Case(name=str(n), ids=tuple(range(n)), num_prompt=n * 3 // 4) for n in (40, 80, 400)]
    fewer = limited(cases, 100)
    assert sum(case.num_positions for case in fewer) == pytest.approx(100, abs=6)
    assert all(case.num_prompt < len(case.ids) for case in fewer)
    assert limited(cases, None) == tuple(cases)
    with pytest.raises(ConfigError, match="--positions must be at least 8, got 3"):
        limited(cases, 3)


def test_what_does_not_fit_the_model_is_cut_or_refused() -> None:
    case = Case(name="long", ids=tuple(range(90)), num_prompt=60)
    (cut,) = check_cases([case], 97, 64)
    assert len(cut.ids) == 64 - 24 - 8
    assert cut.num_prompt < 32
    with pytest.raises(ConfigError, match="Prompt 'long' holds token id 89, but the model has 50 tokens"):
        check_cases([case], 50, 64)
    with pytest.raises(
        ConfigError, match=r"Prompt 'long' does not fit: .* leave 0 tokens .*Raise --context-length and"
    ):
        check_cases([case], 97, 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is no set of prompts"),
        ("[]", "holds 0 prompts of 0 names"),
        ('[{"name": "a", "text": "x y"}, {"name": "a", "text": "z w"}]', "holds 2 prompts of 1 names"),
        ('[{"name": "a", "txt": "x"}]', "is no set of prompts .*txt"),
        ('[{"name": "a", "text": 5}]', "text is 5"),
        ('{"name": "a"}', "is no set of prompts"),
        ("[5]", "is no set of prompts"),
        ('[{"name": "a", "text": "x", "decode": 1.5}]', "decode must be at least 0 and below 1"),
    ],
)
def test_wrong_sets_of_prompts_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_texts(path)


def test_other_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_texts(tmp_path / "absent")
    (tmp_path / "p").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"is no text in UTF-8 .*Save it as such"):
        read_texts(tmp_path / "p")
    with pytest.raises(ConfigError, match="Prompt 'a' has 0 tokens, expected at least 2"):
        Text(name="a", text="").case(lambda text: [])
    with pytest.raises(ConfigError, match="--noise-positions must be at least 8, got 7"):
        Wanted(noise_positions=7)
    with pytest.raises(ConfigError, match="Prompt 'a' has 1 tokens, expected at least 2"):
        Text(name="a", text="x").case(lambda text: [5])
    with pytest.raises(ConfigError, match="--top must be between 1 and 128, got 0"):
        Wanted(top=0)
