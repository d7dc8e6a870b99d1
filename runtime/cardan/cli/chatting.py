"""``cardan chat``: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

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
from cardan.cli.generating import stream_text
from cardan.cli.terminal import StartProgress, messages, set_up_logging, show_error
from cardan.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from cardan.engine import Engine

HELP = "/reset begins anew, /quit leaves, Ctrl-C stops an answer."
MAX_NEW_TOKENS = 512
"""Longest answer where no flag says otherwise: a conversation wants more than a completion."""


@takes_flags((*sampling_flags(), *config_flags(ENGINE_GROUPS), log_level_flag()))
def chat(
    *,
    system: Annotated[str | None, Parameter(help="System message that the conversation begins with.")] = None,
    **values: Any,
) -> int:
    """Chat with a model; earlier turns come from the prefix cache."""
    from cardan.engine import Engine

    config = read_config({"server__log_level": "warning", **values})
    console = messages()
    set_up_logging(config.server.log_level, console)
    sampling = read_sampling({"sampling__max_new_tokens": MAX_NEW_TOKENS, **values})
    with StartProgress(console) as progress, Engine(config=config, on_progress=progress) as engine:
        progress.stop()
        if not engine.tokenizer.has_chat_template:
            raise ConfigError(
                f"Model {config.model.model!r} has no chat template. Pass --chat-template, or use cardan generate."
            )
        console.print(f"{config.model.model}. {HELP}")
        Conversation(engine, sampling, console, system).run()
    return 0


class Conversation:
    """Turns of a user and a model."""

    def __init__(self, engine: Engine, sampling: dict[str, Any], console: Console, system: str | None) -> None:
        """Begin with the system message alone."""
        self._engine = engine
        self._sampling = sampling
        self._console = console
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = list(self._first)

    def run(self) -> None:
        """Take turns until the user leaves."""
        while True:
            try:
                text = self._console.input("[bold cyan]> [/]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if text == "/quit":
                return
            if text == "/reset":
                self._messages = list(self._first)
                self._console.print("[dim]the conversation begins anew[/]")
            elif text.startswith("/"):
                self._console.print(f"[dim]{HELP}[/]")
            elif text:
                self._take_turn(text)

    def _take_turn(self, text: str) -> None:
        messages_so_far = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = self._answer(messages_so_far)
        except RequestError as error:
            show_error(error)
            return
        if answer is None:
            self._console.print("\n[dim]stopped; the turn is forgotten[/]")
            return
        self._messages = [*messages_so_far, {"role": "assistant", "content": answer["text"]}]
        meta = answer["meta_info"]
        self._console.print(
            f"[dim]{meta['completion_tokens']} tokens in {meta['e2e_latency']:.1f} s; prompt {meta['prompt_tokens']}, "
            f"{meta['cached_tokens']} of it cached[/]"
        )

    def _answer(self, conversation: list[dict[str, str]]) -> dict[str, Any] | None:
        tokenizer = self._engine.tokenizer
        ids = tokenizer.encode(tokenizer.render_chat(conversation), add_special_tokens=False)
        answers = self._engine.generate(input_ids=ids, sampling_params=self._sampling, stream=True)
        try:
            return stream_text(answers) or None
        except KeyboardInterrupt:
            answers.close()
            return None
