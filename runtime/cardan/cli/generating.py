"""``cardan generate``: continue prompts and print what comes."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from cardan.cli.flags import (
    ENGINE_GROUPS,
    config_flags,
    log_level_flag,
    read_config,
    read_sampling,
    sampling_flags,
    takes_flags,
)
from cardan.cli.terminal import StartProgress, messages, set_up_logging
from cardan.errors import ConfigError


@takes_flags((*sampling_flags(), *config_flags(ENGINE_GROUPS), log_level_flag()))
def generate(
    *prompts: Annotated[str, Parameter(help="Texts to continue.")],
    chat: Annotated[bool, Parameter(help="Treat each prompt as a user's message.", negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="One JSON object per answer.", negative="")] = False,
    stdin: Annotated[bool, Parameter(help="Read a prompt from standard input.", negative="")] = False,
    **values: Any,
) -> int:
    """Continue prompts, printing the text as it comes; several are run together and printed in order."""
    from cardan.engine import Engine

    texts = [*prompts, sys.stdin.read()] if stdin else list(prompts)
    if not texts:
        raise ConfigError("cardan generate needs a prompt, got none. Write it behind the command, or pass --stdin.")
    config = read_config({"server__log_level": "warning", **values})
    console = messages()
    set_up_logging(config.server.log_level, console)
    sampling = read_sampling(values)
    with StartProgress(console) as progress, Engine(config=config, on_progress=progress) as engine:
        progress.stop()
        asked: dict[str, Any] = {"prompt": texts}
        if chat:
            rendered = [engine.tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
            asked = {"input_ids": [engine.tokenizer.encode(text, add_special_tokens=False) for text in rendered]}
        if as_json:
            for answer in engine.generate(**asked, sampling_params=sampling):
                sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
        elif len(texts) == 1:
            stream_text(engine.generate(**asked, sampling_params=sampling, stream=True))
        else:
            for answer in engine.generate(**asked, sampling_params=sampling):
                sys.stdout.write(answer["text"] + "\n")
    return 0


def stream_text(answers: Any) -> dict[str, Any]:
    """Print a streamed answer as it grows; returns its last state (empty when nothing came)."""
    last: dict[str, Any] = {}
    shown = 0
    for answer in answers:
        sys.stdout.write(answer["text"][shown:])
        sys.stdout.flush()
        shown, last = len(answer["text"]), answer
    sys.stdout.write("\n")
    sys.stdout.flush()
    return last
