"""Chat templates against transformers' own rendering, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cardan.errors import ConfigError, ModelConfigError, RequestError
from cardan.text import Tokenizer, builtin_templates, load_tokenizer, read_chat_template
from cardan.text.chat import ChatInput, ChatTemplate, ContentFormat
from cardan.weights import TokenizerSource

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a «place» <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": '中文 <b> "q" \\n {{ x }}'}],
    "turns": [USER, {"role": "assistant", "content": "Hello.\n"}, {"role": "user", "content": " again "}],
    "thinking": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "more"},
    ],
    "tools": [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Pārīs"}}}],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
    ],
}


def transformers_render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    rendered, _ = render(conversations=[messages], chat_template=source, **options)
    return rendered[0]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, special, "the model")


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return template(source).render(ChatInput(messages=messages or [USER], **options))


# --- real templates -------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("name", ["one", "system", "turns", "thinking"])
@pytest.mark.parametrize("opens", [True, False])
def test_smollm2_prompts_are_those_of_transformers(
    smollm2: Tokenizer, smollm2_metadata: Mapping[str, Any], name: str, opens: bool
) -> None:
    source = smollm2_metadata["tokenizer.chat_template"]
    expected = transformers_render(source, CONVERSATIONS[name], add_generation_prompt=opens)
    assert smollm2.render_chat(CONVERSATIONS[name], add_generation_prompt=opens) == expected


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER]}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("opens", [True, False])
def test_qwen3_prompts_are_those_of_transformers(
    qwen3: Tokenizer, qwen3_folder: Path, name: str, options: dict[str, Any], opens: bool
) -> None:
    source = json.loads((qwen3_folder / "tokenizer_config.json").read_text())["chat_template"]
    expected = transformers_render(source, CONVERSATIONS[name], add_generation_prompt=opens, **options)
    assert qwen3.render_chat(CONVERSATIONS[name], add_generation_prompt=opens, **options) == expected


def test_qwen3_without_thinking_opens_with_an_empty_thought(qwen3: Tokenizer) -> None:
    assert qwen3.render_chat([USER], enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("final", ["The answer", " spaced out \n", "say Hi and Hi"])
def test_continuing_a_final_message_is_as_in_transformers(qwen3: Tokenizer, qwen3_folder: Path, final: str) -> None:
    source = json.loads((qwen3_folder / "tokenizer_config.json").read_text())["chat_template"]
    messages = [USER, {"role": "assistant", "content": "first"}, USER, {"role": "assistant", "content": final}]
    expected = transformers_render(source, messages, continue_final_message=True)
    assert qwen3.render_chat(messages, continue_final_message=True) == expected
    assert expected.rstrip().endswith(final.strip())


def test_a_final_message_that_the_template_hides_cannot_be_continued() -> None:
    for source, content in (("{{ messages[0].role }}", "x"), ("{{ messages[0].content }}", " ")):
        with pytest.raises(RequestError, match="continue_final_message needs a last message whose text") as caught:
            render(source, [{"role": "assistant", "content": content}], continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_helpers_that_templates_expect() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", [USER, USER]) == "user"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{% if true %}\n  a\n{% endif %}\n") == "  a\n"
    assert render("{{ {'é': '<&>'} | tojson }}") == '{"é": "<&>"}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert render("{{ ['a', 'b'] | join(', ') ~ ('-' * 3) ~ 'x'.replace('x', 'y') }}") == "a, b---y"
    assert render("{{ '%s!' % 'a' ~ '{}?'.format('b') ~ ('c\nd' | indent(2)) ~ (2.55 | round(1)) }}") == "a!b?c\n  d2.5"
    assert render("{{ messages | map(attribute='role') | join('/') ~ (messages | join('', 'content')) }}") == "userHi"
    assert render("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ loop is defined }}") == "[1]False"
    assert render("{% for k, v in {'a': 1}.items() %}{{ loop.length }}{{ k }}{{ v }}{% endfor %}") == "1a1"
    assert render("{% for a in [1, [2]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}") == "12"


def test_special_tokens_and_variables_reach_the_template() -> None:
    chat = ChatInput(messages=[USER], documents=[{"text": "d"}], extra={"style": "plain"})
    source = "{{ bos_token }}{{ documents[0].text }}{{ style }}{{ tools is none }}"
    assert template(source, bos_token="<s>").render(chat) == "<s>dplainTrue"


# --- shapes of messages -----------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
STRINGS = "{{ messages[0].content }}"
LISTS = "{% for part in messages[0]['content'] %}[{{ part.text }}]{% endfor %}"
BOTH = (
    "{% set content = messages[0].content %}{% if content is string %}{{ content }}"
    "{% else %}{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "kind", "of_parts", "of_string"),
    [
        (STRINGS, ContentFormat.STRING, "a\nb", "Hi"),
        (LISTS, ContentFormat.OPENAI, "[a][b]", "[Hi]"),
        (BOTH, ContentFormat.OPENAI, "[a][b]", "Hi"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat.STRING, "a\nb", "Hi"),
        ("{% for c in messages[0].content | list %}{{ c.text }}{% endfor %}", ContentFormat.OPENAI, "ab", "Hi"),
    ],
)
def test_content_comes_in_the_form_the_template_reads(
    source: str, kind: ContentFormat, of_parts: str, of_string: str
) -> None:
    assert template(source).content_format is kind
    assert render(source, [{"role": "user", "content": PARTS}]) == of_parts
    assert render(source, [{"role": "user", "content": "Hi"}]) == of_string


def test_no_content_is_empty_content() -> None:
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]) == "[]"
    assert render("[{{ messages[0].content }}]", [{"role": "assistant"}]) == "[]"


def test_arguments_of_calls_are_objects_unless_the_template_tells_strings_apart() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", messages) == '{"a": 1}'
    tells = "{% set x = messages[0].tool_calls[0].function %}{% if x.arguments is string %}{{ x.arguments }}{% endif %}"
    assert render(tells, messages) == '{"a":1}'
    broken = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", broken) == "{a"
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must hold at least one message, got none"),
        (["hi"], r"messages\[0\] must be an object with a 'role'"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a 'role'"),
        (
            [USER, {"role": "user", "content": 5}],
            r"messages\[1\]\.content must be a string or a list of parts, got int",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content may hold parts of type 'text' only, got 'image_url'",
        ),
        ([{"role": "user", "content": [7]}], "got 'int'"),
    ],
)
def test_messages_that_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        template(STRINGS).render(ChatInput(messages=messages))
    assert caught.value.param == "messages"


# --- faults of templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only two roles') }}", "template refuses the messages: only two roles"),
        ("{{ messages[0].absent.field }}", "fails on these messages: UndefinedError: .*absent"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ 1 // 0 }}", "fails on these messages: ZeroDivisionError"),
        ("{{ ''.__class__.mro() }}", "fails on these messages: SecurityError"),
        ("{{ messages.append(1) }}", "fails on these messages: SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages: RecursionError"),
        ("{% include 'x' %}", "fails on these messages: TypeError"),
    ],
)
def test_faults_are_the_requests_and_say_what_happened(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_what_the_template_has_no_place_for_is_refused(smollm2: Tokenizer) -> None:
    for name, value in (("tools", [WEATHER]), ("documents", [{"text": "x"}]), ("enable_thinking", False)):
        with pytest.raises(RequestError, match=f"has no place for '{name}', so it would be ignored") as caught:
            smollm2.render_chat([USER], **{name: value})
        assert caught.value.param == name
    assert smollm2.render_chat([USER], tools=[]) == smollm2.render_chat([USER], tools=None)


def test_names_of_python_are_no_special_variables(smollm2: Tokenizer) -> None:
    """``self`` is what a method calls its object; a request may write what it likes."""
    for name in ("self", "messages_", "cls", "kwargs"):
        with pytest.raises(RequestError, match=f"has no place for '{name}'"):
            smollm2.render_chat([USER], **{name: 1})


def test_arguments_of_a_call_that_are_nested_too_deeply() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    with pytest.raises(RequestError, match="The arguments of a call are nested too deeply") as caught:
        render("{{ messages[0].tool_calls[0].function.name }}", [{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages"


def test_a_variable_of_the_template_cannot_replace_a_field() -> None:
    with pytest.raises(RequestError, match="'messages' has a field of its own"):
        render("{{ messages[0].content }}", extra={"messages": []})


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    for source in ("{% for %}", "{{ x | no_such_filter }}"):
        with pytest.raises(ModelConfigError, match=r"chat template of the model cannot be compiled.*chatml"):
            template(source)


# --- which template -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from cardan.testing.tiny_model import tiny_tokenizer

    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, **config: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(TokenizerSource(folder=folder))


def test_no_template(folder: Path) -> None:
    tokenizer = write(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template FILE.*chatml") as caught:
        tokenizer.render_chat([USER])
    assert caught.value.code == "no_chat_template"


def test_templates_of_a_folder(folder: Path) -> None:
    assert write(folder, chat_template="a{{ messages[0].role }}").render_chat([USER]) == "auser"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    tokenizer = write(folder, chat_template=several)
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=[WEATHER]) == "1"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert write(folder, chat_template="config").render_chat([USER]) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert write(folder, chat_template="config").render_chat([USER]) == "jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].type }}")
    assert write(folder).render_chat([USER], tools=[WEATHER]) == "function"


def test_templates_of_gguf_metadata(sentencepiece_metadata: Mapping[str, Any]) -> None:
    metadata = {
        **sentencepiece_metadata,
        "tokenizer.chat_template": "{{ bos_token }}plain",
        "tokenizer.chat_template.tool_use": "{{ tools | length }}",
    }
    tokenizer = load_tokenizer(TokenizerSource(gguf=metadata))
    assert tokenizer.render_chat([USER]) == "<s>plain"
    assert tokenizer.render_chat([USER], tools=[WEATHER]) == "1"


def test_a_template_by_name_or_file_goes_before_the_models_own(folder: Path, tmp_path: Path) -> None:
    write(folder, chat_template="own", eos_token="<|endoftext|>")
    source = TokenizerSource(folder=folder)
    tokenizer = load_tokenizer(source, chat_template="chatml")
    assert tokenizer.render_chat([USER]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_ids == {256, 258}
    assert load_tokenizer(source).eos_ids == {256}
    path = tmp_path / "mine.jinja"
    path.write_text("mine", encoding="utf-8")
    assert load_tokenizer(source, chat_template=str(path)).render_chat([USER]) == "mine"
    path.write_text("{% if %}", encoding="utf-8")
    with pytest.raises(ModelConfigError, match=r"template of --chat-template .*mine\.jinja cannot be compiled"):
        load_tokenizer(source, chat_template=str(path))


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template 'nope' is neither a file nor one of chatml, gemma"):
        read_chat_template("nope")
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_chat_template(str(tmp_path / "x.jinja"))


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be kind."},
    USER,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
# The prompt formats that the models' makers publish.
NAMED = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral": "<s>[INST] Be kind.\n\nHi [/INST] Hello.</s>[INST] Bye [/INST]",
}


def test_named_templates() -> None:
    assert builtin_templates() == sorted(NAMED)
    for name, expected in NAMED.items():
        named = ChatTemplate(read_chat_template(name), SPECIAL, name)
        assert named.content_format is ContentFormat.STRING
        assert named.render(ChatInput(messages=TALK)) == expected, name
        closed = named.render(ChatInput(messages=TALK, add_generation_prompt=False))
        assert expected.startswith(closed)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_named_templates_that_need_turns_say_so(name: str) -> None:
    with pytest.raises(RequestError, match="must take turns between user and assistant"):
        ChatTemplate(read_chat_template(name), SPECIAL, name).render(ChatInput(messages=[USER, USER]))
