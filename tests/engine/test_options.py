"""Flat options become a config, or are refused with a suggestion."""

from __future__ import annotations

import pytest

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, ServerConfig
from cardan.engine.options import config_from_options
from cardan.errors import ConfigError


def test_options_find_their_groups():
    config = config_from_options(
        {"model": "m", "platform": "null", "max_total_tokens": 64, "stream_interval": 4, "platform_options": ["a=1"]}
    )
    assert config == EngineConfig(
        model=ModelConfig(model="m"),
        platform=PlatformConfig(platform="null", options=("a=1",)),
        cache=CacheConfig(max_total_tokens=64),
        server=ServerConfig(stream_interval=4),
    )


def test_platform_options_may_be_a_mapping():
    assert config_from_options({"platform_options": {"step_ms": 2}}).platform.options == ("step_ms=2",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "m"}, "'modle' is not an option of the engine. Did you mean 'model'?"),
        ({"xyzzy": 1}, "Known: admin_api_key"),
        ({"page_size": "big"}, "page_size='big' is wrong: Expected `int | null`, got `str`"),
        ({"page_size": 0}, "--page-size must be between 1 and 65536, got 0"),
        ({"quantization_fallback": "best"}, "quantization_fallback='best' is wrong"),
        ({"disable_radix_cache": True, "schedule_policy": "lpm"}, "--disable-radix-cache keeps none"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        config_from_options(options)
    assert message in str(caught.value)


def test_options_that_only_fit_together_are_checked_together():
    options = {"schedule_policy": "priority", "priority_scheduling_preemption_threshold": 3}
    config = config_from_options({**options, "enable_priority_scheduling": True})
    assert config.scheduler.schedule_policy == "priority"
    with pytest.raises(ConfigError, match="--enable-priority-scheduling"):
        config_from_options(options)
