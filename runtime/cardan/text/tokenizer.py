"""The tokenizer as the rest of the engine uses it: text to ids, ids to text, messages to a prompt.

It does not know where the files came from, nor what a request is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cardan.errors import RequestError
from cardan.text.detokenizer import Detokenizer
from cardan.text.folder_tokenizer import build_from_folder, end_ids_of
from cardan.text.gguf_tokenizer import build_from_gguf
from cardan.text.named_templates import builtin_templates, read_chat_template
from cardan.text.parts import TokenizerFiles, TokenizerParts, chat_end_ids
from cardan.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from cardan.text.chat import ChatTemplate


class Tokenizer:
    """One model's tokenizer. It has no state that changes, so threads may share it."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._parts = parts
        added = parts.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._vocab_size = 1 + max(max(parts.backend.get_vocab(with_added_tokens=True).values(), default=-1), -1)
        self._token_bytes = TokenBytes(parts.backend)
        self._templates = _compile_templates(parts)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. A model's own vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self._parts.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: of the tokenizer, of the generation config, and of the chat template."""
        return self._parts.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out of a text."""
        return self._special_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the special tokens that the files name, by ``bos_token``, ``eos_token`` and so on."""
        return self._parts.special_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` has a template."""
        return bool(self._templates)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources of the chat templates by name; empty where none is rendered."""
        return self._parts.templates

    def template_reads(self, variable: str) -> bool:
        """Whether a chat template looks at a variable of its own, such as ``enable_thinking``."""
        return any(template.reads(variable) for template in self._templates.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens that are written out in it become their ids.

        Args:
            text: what to encode.
            add_special_tokens: put BOS before and EOS behind it where the model wants that.

        Raises:
            RequestError: the text is not valid Unicode (it holds half of a surrogate pair).
        """
        try:
            # As a batch of one, since the backend lets go of the interpreter's lock for batches only: a long text
            # must not hold up whatever else this process serves.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "The text holds half of a surrogate pair (a \\ud800 to \\udfff escape without its partner), "
                "which no encoding can hold. Send valid Unicode."
            ) from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``.

        Raises:
            RequestError: an id is below 0 or not in the vocabulary.
        """
        ids = list(token_ids)
        self.check_ids(ids)
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Check that every id is in the vocabulary.

        Raises:
            RequestError: an id is below 0 or not in the vocabulary.
        """
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            wrong = next(index for index in token_ids if not 0 <= index < self._vocab_size)
            raise RequestError(f"Token ids must be 0 to {self._vocab_size - 1}, got {wrong}.")

    def detokenizer(
        self, *, skip_special_tokens: bool = True, continues: bool = False, shown: Iterable[int] = ()
    ) -> Detokenizer:
        """A fresh incremental detokenizer.

        Args:
            skip_special_tokens: special tokens give no text.
            continues: as in ``Detokenizer``.
            shown: special tokens that give their text all the same.
        """
        skipped = self._special_ids.difference(shown) if skip_special_tokens else frozenset()
        return Detokenizer(self._token_bytes, skipped=skipped, continues=continues)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token stands for (not always whole characters); empty for an id that no token has."""
        return self._token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, with U+FFFD where its bytes are not whole characters."""
        return self._token_bytes[token_id].decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Id of the token written exactly so in the vocabulary, or None."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation. It holds its special tokens: encode it with ``add_special_tokens=False``.

        Args:
            messages: as in the OpenAI API.
            tools: functions the model may call, as in the OpenAI API.
            add_generation_prompt: end with the start of an assistant's turn.
            kwargs: ``documents``, ``continue_final_message``, and variables of the template's own.

        Raises:
            RequestError: there is no template, or see ``ChatTemplate.render``.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()), None)
        if template is None:
            raise RequestError(
                "This model has no chat template. Use completions with a prompt of your own, or start the server with "
                f"--chat-template FILE or one of the names {', '.join(builtin_templates())}.",
                param="messages",
                code="no_chat_template",
            )
        from cardan.text.chat import ChatInput

        return template.render(
            ChatInput(
                messages=messages,
                tools=tools,
                documents=kwargs.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=kwargs.pop("continue_final_message", False),
                extra=kwargs,
            )
        )


def _compile_templates(parts: TokenizerParts) -> dict[str, ChatTemplate]:
    if not parts.templates:
        return {}
    from cardan.text.chat import ChatTemplate  # loads Jinja

    return {name: ChatTemplate(source, parts.special_tokens, parts.origin) for name, source in parts.templates.items()}


def load_tokenizer(
    source: TokenizerFiles,
    *,
    generation_config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    renders_chat: bool = True,
) -> Tokenizer:
    """Read a tokenizer.

    Args:
        source: a folder with ``tokenizer.json``, or the metadata of a GGUF file.
        generation_config: the model's; its ``eos_token_id`` ends answers too.
        chat_template: the name of a built-in template or a file, instead of the model's own.
        renders_chat: compile the chat templates; without them a process saves the time and Jinja's memory.

    Raises:
        ConfigError: ``chat_template`` names nothing.
        ModelConfigError: the chat template is not valid.
        CheckpointError: files are missing, damaged, or of a kind that is not read.
        UnsupportedModelError: its tokens cannot be turned into text.
    """
    if (source.folder is None) == (source.gguf is None):
        raise ValueError("A tokenizer source has a folder or GGUF metadata, one of the two.")
    if source.folder is not None:
        parts = build_from_folder(source.folder)
    else:
        assert source.gguf is not None
        parts = build_from_gguf(source.gguf)
    if chat_template is not None:
        templates = {"default": read_chat_template(chat_template)}
        parts = replace(parts, templates=templates, origin=f"--chat-template {chat_template}")
    ends = parts.eos_ids | end_ids_of(generation_config or {})
    ends |= chat_end_ids(parts.backend, parts.templates.get("default"))
    return Tokenizer(replace(parts, eos_ids=ends, templates=parts.templates if renders_chat else {}))
