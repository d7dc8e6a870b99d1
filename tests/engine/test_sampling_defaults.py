"""Sampling defaults of a model: read from its file, shown in the plan, used where a request says nothing."""

from __future__ import annotations

import json
import shutil

import pytest
from plan_examples import LACKS, NATIVE, plan

from cardan.engine.preparation import resolve_plan
from cardan.engine.sampling_defaults import with_sampling_defaults
from cardan.errors import ModelConfigError, UnsupportedError
from cardan.platform import Capabilities, Feature, SettingSource
from cardan.testing.null_tokens import expected_tokens
from cardan.types import SamplingParams

ALL = Capabilities({Feature.SAMPLING: NATIVE, Feature.PENALTIES: NATIVE})


@pytest.fixture
def model(tiny_model, tmp_path):
    """Writes a copy of the tiny model with further entries in its ``generation_config.json``."""

    def write(**entries):
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
        return str(folder)

    return write


def test_what_the_file_says_is_in_the_plan(null_config, model):
    folder = model(temperature=0.6, top_p=0.95, top_k=0, do_sample=True, max_length=20, min_p=None)
    setting = resolve_plan(null_config(model=folder)).settings["sampling_defaults"]
    assert setting.value == {"temperature": 0.6, "top_p": 0.95, "top_k": -1}
    assert (setting.source, setting.why) == (
        SettingSource.MODEL,
        "generation_config.json, for what a request does not state",
    )
    setting = resolve_plan(null_config(model=folder, sampling_defaults="openai")).settings["sampling_defaults"]
    assert (setting.value, setting.source, setting.why) == (None, SettingSource.FLAG, "--sampling-defaults openai")


def test_a_file_without_them_changes_nothing(null_config):
    setting = resolve_plan(null_config()).settings["sampling_defaults"]
    assert (setting.value, setting.source) == (None, SettingSource.MODEL)
    assert setting.why == "the model's files name none: temperature 1.0, no filter, no penalty"


def test_requests_take_them_unless_they_state_their_own(start_engine, model, vocabulary):
    engine = start_engine(model=model(temperature=0.0)).engine
    prompt = [3, 4, 5]

    def answer(**sampling):
        stated = {"max_new_tokens": 24, "ignore_eos": True, "seed": 5, **sampling}
        return engine.generate(input_ids=prompt, sampling_params=stated)["output_ids"]

    def expected(temperature):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5, temperature=temperature)
        return expected_tokens(prompt, params, vocabulary)

    assert answer() == expected(0.0) != expected(1.0)
    assert answer(temperature=1.0) == expected(1.0)
    assert engine.get_server_info()["sampling_defaults"] == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 100, got -1"),
        ({"top_k": "many"}, "top_k is wrong: Expected `int`, got `str`"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and at most 2, got 0"),
    ],
)
def test_what_cannot_be_used_ends_the_start(entries, message):
    with pytest.raises(ModelConfigError) as caught:
        with_sampling_defaults(plan(), "model", entries, ALL)
    assert str(caught.value).startswith("The generation_config.json of model 'tiny' gives sampling defaults that")
    assert message in str(caught.value)
    assert str(caught.value).endswith("Correct the file, or pass --sampling-defaults openai.")
    assert with_sampling_defaults(plan(), "openai", entries, ALL).value("sampling_defaults") is None


def test_what_the_platform_lacks_ends_the_start():
    lacks = Capabilities({Feature.SAMPLING: NATIVE, Feature.PENALTIES: LACKS})
    with pytest.raises(UnsupportedError, match="repetition_penalty needs penalties, which platform 'npu' does not"):
        with_sampling_defaults(plan(), "model", {"repetition_penalty": 1.1}, lacks)
    assert with_sampling_defaults(plan(), "model", {"top_p": 0.9}, Capabilities({})).value("sampling_defaults")
