"""Renders conversations to prompts with a chat template.

It does not know HTTP: messages are plain mappings, as the OpenAI API writes them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import meta, nodes

from cardan.errors import ModelConfigError, RequestError
from cardan.text.named_templates import builtin_templates
from cardan.text.template_sandbox import SandboxEnvironment, TemplateLimitError, TemplateRefusalError

Message = Mapping[str, Any]

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ContentFormat(enum.StrEnum):
    """What a template expects under a message's ``content``: a string, or OpenAI's list of parts."""

    STRING = "string"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """What one prompt is rendered from.

    Attributes:
        messages: each with a ``role`` and usually ``content``: a string, None, or a list of parts.
        tools: JSON schemas of functions, as the OpenAI API writes them.
        documents: texts to answer from, for templates that have a place for them.
        add_generation_prompt: end with the start of an assistant's turn.
        continue_final_message: leave the last message open, so that the answer goes on from it.
        extra: the template's own variables.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """One compiled template. It has no state that changes, so threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """Compile a template.

        Args:
            source: Jinja.
            special_tokens: ``bos_token`` … to their text.
            origin: where it came from, for messages of errors.

        Raises:
            ModelConfigError: it is not valid Jinja, or uses a filter or test that there is none of.
        """
        environment = SandboxEnvironment()
        try:
            tree = environment.read(source)
            self._code = environment.compile(source)
        except jinja2.TemplateError as error:
            raise ModelConfigError(
                f"The chat template of {origin} cannot be compiled: {' '.join(str(error).split())}. "
                "Pass --chat-template with a file, or with one of the names " + ", ".join(builtin_templates()) + "."
            ) from error
        self._special_tokens = dict(special_tokens)
        self._read = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
        self._variables = frozenset(meta.find_undeclared_variables(tree))
        self.content_format = _content_format(tree)
        self._tests_content = _tests_string(tree, "content")
        self._tests_arguments = _tests_string(tree, "arguments")
        self._shows_calls = any(_reads(node, "tool_calls") for node in tree.find_all((nodes.Getattr, nodes.Getitem)))

    def render(self, chat: ChatInput) -> str:
        """The prompt for a conversation.

        Raises:
            RequestError: messages are of the wrong shape, the template has no place for what was given, refuses it,
                fails on it, or does more than it may.
        """
        messages = [self._message(message, index) for index, message in enumerate(_checked_messages(chat.messages))]
        self._check_variables(chat)
        variables: dict[str, Any] = dict(self._special_tokens)
        variables |= chat.extra
        variables |= {
            "messages": messages,
            "tools": chat.tools or None,
            "documents": chat.documents or None,
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
        text = self._run(variables)
        return _left_open(text, messages[-1]) if chat.continue_final_message else text

    def reads(self, variable: str) -> bool:
        """Whether the template looks at a variable."""
        return variable in self._read

    def _check_variables(self, chat: ChatInput) -> None:
        given = {"tools": chat.tools, "documents": chat.documents}
        names = [name for name, value in given.items() if value] + list(chat.extra)
        for name in names:
            if name not in self._read:
                raise RequestError(
                    f"The model's chat template has no place for {name!r}, so it would be ignored. "
                    f"It knows {', '.join(sorted(self._variables))}. Leave {name!r} out, "
                    "or start the server with another --chat-template.",
                    param=name,
                )
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(chat.extra)
        if reserved:
            name = min(reserved)
            raise RequestError(f"{name!r} has a field of its own; it cannot be a template variable too.", param=name)

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return SandboxEnvironment().load_code(self._code).render(variables)
        except TemplateRefusalError as error:
            raise RequestError(f"The model's chat template refuses the messages: {error}", param="messages") from error
        except TemplateLimitError as error:
            raise RequestError(
                f"The model's chat template was stopped because {error}. Send fewer or shorter messages, "
                "or start the server with another --chat-template.",
                param="messages",
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise RequestError(
                f"The model's chat template fails on these messages: {type(error).__name__}: {error}. "
                "Check that each message has the fields the template reads.",
                param="messages",
            ) from error

    def _message(self, message: Message, index: int) -> dict[str, Any]:
        """A message as the template expects it."""
        result = dict(message)
        result["content"] = self._content(message.get("content"), index)
        calls = message.get("tool_calls")
        if calls and not self._shows_calls:
            raise RequestError(
                f"messages[{index}] has tool_calls, but the model's chat template has no place for them. Put what was "
                "called into the content, or start the server with another --chat-template.",
                param="messages",
            )
        if calls and not self._tests_arguments:
            result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return result

    def _content(self, content: object, index: int) -> Any:
        if content is None:
            content = ""
        if isinstance(content, str):
            wraps = self.content_format is ContentFormat.OPENAI and not self._tests_content
            return [{"type": "text", "text": content}] if wraps else content
        if not isinstance(content, list | tuple):
            raise RequestError(
                f"messages[{index}].content must be a string or a list of parts, got {type(content).__name__}.",
                param="messages",
            )
        texts = [_part_text(part, index) for part in content]
        if self.content_format is ContentFormat.OPENAI:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _checked_messages(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages:
        raise RequestError("messages must hold at least one message, got none.", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be an object with a 'role'.", param="messages")
    return messages


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"messages[{index}].content may hold parts of type 'text' only, got {kind!r}. This model reads text.",
            param="messages",
        )
    return text


def _with_parsed_arguments(call: Any) -> Any:
    """A tool call whose arguments, a JSON text in the API, are an object, as templates write them out."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except RecursionError:
        raise RequestError("The arguments of a call are nested too deeply to be read.", param="messages") from None
    except ValueError:
        return call  # not JSON: the model wrote it so, and gets it back so
    return {**call, "function": {**function, "arguments": arguments}}


def _left_open(text: str, message: Mapping[str, Any]) -> str:
    """``text`` cut behind the last message's own words."""
    content = message["content"]
    if isinstance(content, list):
        content = content[-1]["text"] if content else ""
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        raise RequestError(
            "continue_final_message needs a last message whose text the chat template shows unchanged. "
            "Send it non-empty, or set continue_final_message to false.",
            param="continue_final_message",
        )
    whole = content.lstrip()
    return text[: at + len(whole)] if text.startswith(whole, at) else text[: at + len(content.strip())]


# --- what a template looks at -----------------------------------------------------------------------


def _reads(node: nodes.Node, name: str) -> bool:
    """Whether an expression is some object's ``name``."""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == name


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Variables that a template sets to some object's ``name``."""
    return {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _reads(assign.node, name)
    }


def _content_format(tree: nodes.Template) -> ContentFormat:
    aliases = _aliases(tree, "content")
    for loop in tree.find_all(nodes.For):
        target: nodes.Node = loop.iter
        while isinstance(target, nodes.Filter) and target.node is not None:
            target = target.node
        if _reads(target, "content") or (isinstance(target, nodes.Name) and target.name in aliases):
            return ContentFormat.OPENAI
    return ContentFormat.STRING


def _tests_string(tree: nodes.Template, name: str) -> bool:
    """Whether the template asks if some object's ``name`` is a string."""
    aliases = _aliases(tree, name)
    return any(
        _reads(test.node, name) or (isinstance(test.node, nodes.Name) and test.node.name in aliases)
        for test in tree.find_all(nodes.Test)
        if test.name == "string"
    )
