"""Builds a tokenizer from the metadata of a GGUF file.

It does not open the file: it gets the metadata as key to value, and knows only ``tokenizer.*`` keys
and ``general.architecture``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from cardan.errors import CheckpointError
from cardan.text.parts import TokenizerParts
from cardan.text.pretokenizers import pre_tokenizer_for

_SPACE = "▁"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
}
_NO_TOKEN = (-1, 2**32 - 1)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ITEMS: Mapping[str, tuple[set[type], str]] = {
    "tokens": ({str}, "texts"),
    "token_type": ({int}, "whole numbers"),
    "scores": ({int, float}, "numbers"),
    "merges": ({str}, "texts"),
}
"""Keys with lists, and what they hold."""


class TokenType(enum.IntEnum):
    """What ``tokenizer.ggml.token_type`` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build a tokenizer from GGUF metadata.

    Raises:
        CheckpointError: keys are missing, contradict each other, or name a kind of tokenizer that is not known.
    """
    _check_lists(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens), True
    else:
        raise CheckpointError(
            f"The GGUF file's tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' can be read. "
            "Pass --tokenizer FOLDER with the model's tokenizer.json."
        )
    _add_special(backend, metadata, tokens)
    bos_id = _token_id(metadata, "bos_token_id", tokens)
    _set_template(backend, metadata, tokens, adds_bos)
    ends = {_token_id(metadata, key, tokens) for key in _END_KEYS} - {None}
    named = {name: _token_id(metadata, key, tokens) for name, key in _NAMED.items()}
    return TokenizerParts(
        backend=backend,
        special_tokens={name: tokens[index] for name, index in named.items() if index is not None},
        bos_id=bos_id,
        eos_ids=frozenset(index for index in ends if index is not None),
        templates=_templates(metadata),
    )


def _check_lists(metadata: Mapping[str, Any]) -> None:
    for key, (kinds, words) in _ITEMS.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not (isinstance(value, list) and set(map(type, value)) <= kinds):
            raise CheckpointError(
                f"The GGUF file's tokenizer.ggml.{key} is no list of {words}; it is damaged. Fetch it again."
            )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(
            "The GGUF file holds no tokenizer (tokenizer.ggml.tokens is missing). "
            "Pass --tokenizer FOLDER with the model's tokenizer.json."
        )
    return tokens


def _token_types(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [TokenType.NORMAL] * count
    if len(types) != count:
        raise CheckpointError(
            f"The GGUF file has {count} tokens but {len(types)} token types; it is damaged. Fetch it again."
        )
    return list(types)


def _token_id(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None or value in _NO_TOKEN:
        return None
    if type(value) is not int or not 0 <= value < len(tokens):
        raise CheckpointError(
            f"The GGUF file's tokenizer.ggml.{key} is {str(value)[:40]}, but it has {len(tokens)} tokens; "
            "it is damaged. Fetch it again."
        )
    return value


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token text to id; where two tokens share a text, the first keeps it."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    rules = pre_tokenizer_for(pre if isinstance(pre, str | None) else repr(pre)[:40])
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(
            "The GGUF file has a byte-level tokenizer without tokenizer.ggml.merges. "
            "Pass --tokenizer FOLDER with the model's tokenizer.json."
        )
    pairs = [_merge(merge) for merge in merges]
    backend = _bpe(models.BPE, vocab=_vocabulary(tokens), merges=pairs, ignore_merges=rules.ignore_merges)
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _merge(text: str) -> tuple[str, str]:
    # A piece may itself begin with a space: the separator is the first space after the first character.
    at = text.find(" ", 1)
    if at < 0:
        raise CheckpointError(f"A merge of the GGUF file's tokenizer is {text!r}; two pieces are expected.")
    return text[:at], text[at + 1 :]


def _bpe(model: type[models.BPE], **options: Any) -> Backend:
    try:
        return Backend(model(**options))
    except Exception as error:
        raise CheckpointError(
            f"The GGUF file's tokenizer contradicts itself: {error}. Pass --tokenizer FOLDER with a tokenizer.json."
        ) from error


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    vocabulary = _vocabulary(tokens)
    types = _token_types(metadata, len(tokens))
    unknown = _token_id(metadata, "unknown_token_id", tokens)
    backend = _bpe(
        models.BPE,
        vocab=vocabulary,
        merges=_merges_from_ranks(vocabulary, types, _ranks(metadata, tokens)),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _ranks(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Sequence[float]:
    """What orders the merges, lowest first: the scores, or for Gemma (whose scores do not) the ids."""
    if str(metadata.get("general.architecture", "")).startswith("gemma"):
        return range(len(tokens))
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"The GGUF file has {len(tokens)} SentencePiece tokens but "
            f"{0 if scores is None else len(scores)} scores. Pass --tokenizer FOLDER with a tokenizer.json."
        )
    return [-float(score) for score in scores]


def _merges_from_ranks(
    vocabulary: Mapping[str, int], types: Sequence[int], ranks: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way in which two tokens make a third, in the order in which the third ones rank.

    SentencePiece joins the pair whose result scores best; a list of merges in that order does the same.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        if types[index] not in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((ranks[index], left, right, token[:cut], token[cut:]))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for _, _, _, left, right in found]


def _add_special(backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    types = _token_types(metadata, len(tokens))
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and token:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED and token and _SPACE not in token:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _set_template(backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str], adds_bos: bool) -> None:
    """Make encoding add BOS and EOS as the file says."""
    bos = _token_id(metadata, "bos_token_id", tokens)
    eos = _token_id(metadata, "eos_token_id", tokens)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    set_bos_eos(
        backend,
        tokens[bos] if add_bos and bos is not None else None,
        tokens[eos] if add_eos and eos is not None else None,
    )


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make encoding put ``bos`` before and ``eos`` behind a text; None for neither."""
    if bos is None and eos is None:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        return
    # Names of our own, since a token's text may hold what means something in a template.
    names = {"BOS": bos, "EOS": eos}
    tokens = [
        {"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]}
        for name, text in names.items()
        if text is not None
    ]
    single = " ".join(part for part in (bos and "BOS:0", "$A:0", eos and "EOS:0") if part)
    pair = " ".join(part for part in (single, bos and "BOS:1", "$B:1", eos and "EOS:1") if part)
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    prefix = "tokenizer.chat_template."
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = str(value)
        elif key.startswith(prefix):
            templates[key.removeprefix(prefix)] = str(value)
    return templates
