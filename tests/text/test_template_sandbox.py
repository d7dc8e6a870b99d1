"""Templates that would loop for ever or explode in size are stopped, and soon."""

from __future__ import annotations

import time

import pytest

from cardan.errors import RequestError
from cardan.text.chat import ChatInput, ChatTemplate

USER = {"role": "user", "content": "Hi"}

GREEDY = {
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "loops that keep nothing": "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
    "a tree of macros": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
    "a recursive loop": (
        "{% for n in [40] recursive %}{% if n %}{{ loop([n - 1]) }}{{ loop([n - 1]) }}{% endif %}{% endfor %}"
    ),
    "doubling with ~": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling with +": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by capture": (
        "{% set n = namespace(s='ab') %}"
        "{% for i in range(99) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}"
    ),
    "growing bit by bit": (
        "{% set n = namespace(s='a' * 1000000) %}{% for i in range(9000) %}{% set n.s = n.s + 'a' %}{% endfor %}"
    ),
    "a long text": "{{ 'x' * 10 ** 10 }}",
    "a long list": "{{ [1] * 10 ** 10 }}",
    "a long output": "{% for i in range(9000) %}{{ 'y' * 100000 }}{% endfor %}",
    "a huge power": "{{ 10 ** 99999 }}",
    "huge products": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a computed width": "{{ '%*d' % (999999999, 1) }}",
    "a wide str.format": "{{ '{:999999999}'.format(1) }}",
    "a computed str.format": "{{ '{:{}}'.format(1, 999999999) }}",
    "a wide format filter": "{{ '%999999999d' | format(1) }}",
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "padding of bytes": "{{ 'x'.encode().ljust(10 ** 10) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "replacing": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "the replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "joining": "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "the join filter": "{{ (['a'] * 99999) | join('b' * 99999) }}",
    "translating": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "indenting": "{{ ('\n' * 99999) | indent(99999, true, true) }}",
    "indenting JSON": "{{ [1] | tojson(indent=10 ** 10) }}",
    "indenting JSON with text": "{{ [1] | tojson(indent=' ' * 99999) }}",
    "rounding": "{{ 1.5 | round(10 ** 9) }}",
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_templates_are_stopped(name: str) -> None:
    template = ChatTemplate(GREEDY[name], {}, "the model")
    start = time.process_time()
    with pytest.raises(RequestError, match="chat template was stopped because it") as caught:
        template.render(ChatInput(messages=[USER]))
    assert time.process_time() - start < 20  # of this process alone; a second or so on a quiet machine
    assert caught.value.param == "messages"


def test_a_long_conversation_is_well_within_the_bounds() -> None:
    source = (
        "{% for message in messages[::-1] %}{% if message.role == 'x' %}{{ message.role }}{% endif %}{% endfor %}"
        "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 100}] * 5000
    text = ChatTemplate(source, {}, "the model").render(ChatInput(messages=messages))
    assert text == ("<user>" + "word " * 100) * 5000


def test_each_rendering_has_bounds_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok", {}, "the model")
    for _ in range(12):
        assert template.render(ChatInput(messages=[USER])) == "ok"


def test_a_template_cannot_redefine_the_counting() -> None:
    source = (
        "{% set count_step = none %}{% macro _charge() %}{% endmacro %}"
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="more than 1000000 steps"):
        ChatTemplate(source, {}, "the model").render(ChatInput(messages=[USER]))


@pytest.mark.parametrize("name", ["lipsum(9)", "'a' | center(9)", "'a' | wordwrap(1)", "'a' | random"])
def test_what_is_left_out(name: str) -> None:
    from cardan.errors import ModelConfigError

    with pytest.raises((RequestError, ModelConfigError)):
        ChatTemplate("{{ " + name + " }}", {}, "the model").render(ChatInput(messages=[USER]))
