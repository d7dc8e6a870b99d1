r"""How many characters a pattern needs before it matches, against trying it out."""

from __future__ import annotations

import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from cardan.text.regex_width import first_match_width


@pytest.mark.parametrize(
    ("pattern", "width"),
    [
        ("abc", 3),
        (r"\d+", 1),
        (r"\n\n+", 2),
        ("a|bcd", 3),
        ("(ab|c)d*", 2),
        ("x{3,5}", 3),
        ("x{3,5}y", 6),
        ("x{2}", 2),
        ("(ab){2,}", 4),
        ("a+?", 1),
        ("a.*b", None),
        (r"\d+$", None),
        (r"foo\b", 4),
        ("[]a-z]x", 2),
        ("[^]]{2}", 2),
        (r"[[:alpha:]\]]q", 2),
        (r"\pL\p{Greek}", 2),
        (r"\x{1F600}\x41", 2),
        (r"(?i)stop", 4),
        (r"(?i:stop)!", 5),
        (r"(?P<name>ab)(?<other>c)", 3),
        (r"\Qa.b\E", 3),
        (r"\Qa.b\E+", None),
        (r"a{b", 3),
        (r"a{,2}", 5),
        (r"(a*)*b", None),
        (r"(^)+a", 1),
        (r"\.\?", 2),
        (r"\C", None),
    ],
)
def test_widths(pattern: str, width: int | None) -> None:
    re2.compile(pattern)
    assert first_match_width(pattern) == width


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", ".", "^", "$", r"\b", r"\B", "(?:)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "+?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(pattern=PATTERNS, text=st.text("ab ", max_size=14))
def test_no_match_begins_further_back_than_the_width(pattern: str, text: str) -> None:
    options = re2.Options()
    options.log_errors = False
    try:
        regex = re2.compile(pattern, options)
    except re2.error:
        return
    width = first_match_width(pattern)
    if width is None or regex.search("") is not None:
        return
    for end in range(1, len(text) + 1):
        match = regex.search(text[:end])
        if match is not None:
            # It appeared with the last character, so it begins this far back at most.
            assert end - match.start() <= width
            return
