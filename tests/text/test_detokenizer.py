"""Streamed text against decoding everything at once, for random tokens and random splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from cardan.text import Detokenizer, Tokenizer, load_tokenizer
from cardan.weights import TokenizerSource

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def stream(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
    """Push ``ids`` in pieces of the lengths ``cuts`` (repeated), then finish."""
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return "".join(pieces) + detokenizer.finish()


CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@pytest.mark.model
@RELAXED
@given(ids=st.lists(st.integers(0, 49151), max_size=60), cuts=CUTS, skip=st.booleans())
def test_pieces_join_to_the_text_of_all_tokens(
    smollm2: Tokenizer, smollm2_backend: Backend, ids: list[int], cuts: list[int], skip: bool
) -> None:
    expected = smollm2_backend.decode(ids, skip_special_tokens=skip)
    assert smollm2.decode(ids, skip_special_tokens=skip) == expected
    assert stream(smollm2.detokenizer(skip_special_tokens=skip), ids, cuts) == expected


@pytest.fixture(scope="module")
def byte_ids(smollm2: Tokenizer) -> list[int]:
    """Tokens that are a single byte from 0x80 on: what broken and unfinished characters are made of."""
    single = [index for index in range(49152) if len(smollm2.token_bytes(index)) == 1]
    return [index for index in single if smollm2.token_bytes(index)[0] >= 0x80]


@pytest.mark.model
@RELAXED
@given(data=st.data(), cuts=CUTS)
def test_broken_bytes_are_replaced_as_the_library_does(
    smollm2: Tokenizer, smollm2_backend: Backend, byte_ids: list[int], data: st.DataObject, cuts: list[int]
) -> None:
    ids = data.draw(st.lists(st.sampled_from([*byte_ids, 28120]), max_size=40))
    assert stream(smollm2.detokenizer(), ids, cuts) == smollm2_backend.decode(ids)


@pytest.mark.model
def test_a_character_comes_when_it_is_whole_and_no_later(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a🎉b")
    detokenizer = smollm2.detokenizer()
    pieces = [detokenizer.push([index]) for index in ids]
    assert "".join(pieces) == "a🎉b"
    assert pieces[-1] == "b"
    assert "" in pieces
    assert all("\ufffd" not in piece for piece in pieces)
    assert detokenizer.finish() == ""


@pytest.mark.model
def test_the_last_word_is_not_held_back(smollm2: Tokenizer) -> None:
    detokenizer = smollm2.detokenizer()
    assert detokenizer.push(smollm2.encode("The capital")) == "The capital"


@pytest.mark.model
def test_an_unfinished_character_shows_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🎉")
    detokenizer = smollm2.detokenizer()
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.model
def test_bytes_that_never_end_are_neither_held_nor_slow(smollm2: Tokenizer, byte_ids: list[int]) -> None:
    lead = next(index for index in byte_ids if smollm2.token_bytes(index) == b"\xf0")
    detokenizer = smollm2.detokenizer()
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push([lead] * 10) == "\ufffd" * 10

    for _ in range(100):
        detokenizer.push([lead])
        assert len(detokenizer._decoder.getstate()[0]) <= 3  # all that a later token has to look at


@pytest.mark.model
def test_ids_that_no_token_has_give_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.detokenizer().push([49152, -1, 28120]) == "hello"


# --- SentencePiece --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(sentencepiece_metadata: Mapping[str, Any]) -> Tokenizer:
    return load_tokenizer(TokenizerSource(gguf=sentencepiece_metadata))


@pytest.fixture(scope="module")
def pieces_backend(sentencepiece_backend: Backend) -> Backend:
    """The library's decoder for such a vocabulary."""
    backend = Backend.from_str(sentencepiece_backend.to_str())
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def valid_runs(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether byte tokens form whole characters; on broken runs the library gives up the good bytes as well."""
    run = b""
    for index in [*ids, 300]:
        if 3 <= index < 259:
            run += bytes([index - 3])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@RELAXED
@given(
    words=st.lists(st.one_of(st.text(max_size=6), st.sampled_from(["the ", " fox", "  ", "\n", "🎉"])), max_size=12),
    cuts=CUTS,
)
def test_sentencepiece_streams_as_the_library_decodes(
    pieces: Tokenizer, pieces_backend: Backend, words: list[str], cuts: list[int]
) -> None:
    ids = [index for word in words for index in pieces.encode(word, add_special_tokens=False)]
    expected = pieces_backend.decode(ids)
    assert pieces.decode(ids) == expected
    assert stream(pieces.detokenizer(), ids, cuts) == expected


@RELAXED
@given(ids=st.lists(st.integers(3, 500), max_size=40), cuts=CUTS)
def test_sentencepiece_random_tokens(
    pieces: Tokenizer, pieces_backend: Backend, ids: list[int], cuts: list[int]
) -> None:
    whole = pieces.decode(ids)
    assert stream(pieces.detokenizer(), ids, cuts) == whole
    if valid_runs(pieces, ids):
        assert whole == pieces_backend.decode(ids)


def test_sentencepiece_broken_bytes_count_one_by_one(pieces: Tokenizer) -> None:
    byte = {value: value + 3 for value in range(256)}
    assert pieces.decode([byte[0xE4], byte[0xB8], pieces.encode("x", add_special_tokens=False)[-1]]) == "\ufffd\ufffdx"


def test_the_space_before_a_text_is_dropped_only_where_a_text_begins(pieces: Tokenizer) -> None:
    ids = pieces.encode("the fox", add_special_tokens=False)
    assert pieces.detokenizer().push(ids) == "the fox"
    assert pieces.detokenizer(continues=True).push(ids) == " the fox"
    detokenizer = pieces.detokenizer()
    assert detokenizer.push([1]) == ""
    assert detokenizer.push(ids) == "the fox"
    assert detokenizer.push(ids) == " the fox"


def test_metaspace_decoders(sentencepiece_backend: Backend, tmp_path: Any) -> None:
    backend = Backend.from_str(sentencepiece_backend.to_str())
    for scheme, expected in (("always", "the dog"), ("first", "the dog"), ("never", " the dog")):
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(TokenizerSource(folder=tmp_path))
        ids = [backend.token_to_id("▁the"), backend.token_to_id("▁dog")]
        assert tokenizer.decode(ids) == expected == backend.decode(ids)


def test_tokens_outside_the_byte_alphabet_are_their_own_text(tmp_path: Any) -> None:
    from tokenizers import AddedToken, models

    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("two words", special=False), AddedToken("｜", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(TokenizerSource(folder=tmp_path))
    ids = [0, 2, 3, 1]
    assert tokenizer.decode(ids) == backend.decode(ids) == "atwo words｜b"
