"""Makes a golden record from the logprobs of any server that speaks OpenAI's completions.

It needs httpx, which the ``bench`` extra brings. Such servers name tokens by their texts; a text that stands for no
token of the tokenizer counts among the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case
from cardan.accuracy.fingerprints import Fingerprint, tokenizer_print
from cardan.accuracy.golden import Golden, Recorded
from cardan.accuracy.recording import Wanted, make_cases, text_of, tokenizer_for
from cardan.accuracy.scores import Greedy, Scores, rest_of
from cardan.accuracy.session import Progress
from cardan.config import EngineConfig
from cardan.errors import CardanError, ConfigError
from cardan.text.tokenizer import Tokenizer

TIMEOUT_S = 600.0
CONNECT_S = 10.0
BAD_REQUEST = 400
LEAST_TOKENS = 8
"""Of a prompt by which a server's tokenizer is told from another."""
NO_LOGPROB = -100.0
"""Stands for alternatives that a server leaves out: a probability of nothing."""


class ServerError(CardanError):
    """The server refused a request, or its answer lacks what a record needs."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Those of an answer, in OpenAI's parallel lists.

    Attributes:
        tokens: their texts; empty where the server leaves them out.
        own: of each token; None of the first of a prompt.
        likeliest: by text, of each token; None of the first of a prompt.
    """

    tokens: Sequence[str | None]
    own: Sequence[float | None]
    likeliest: Sequence[Mapping[str, float] | None]

    @classmethod
    def of(cls, answer: Any) -> Logprobs | None:
        """Those of the first choice; None where it has none.

        Raises:
            ValueError: they are of another form.
        """
        found = answer
        for step in ("choices", 0, "logprobs"):
            held = isinstance(found, list) and found if step == 0 else isinstance(found, dict) and step in found
            if not held:
                return None
            found = found[step]
        if not isinstance(found, dict):
            return None
        tokens, own, likeliest = (found.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
        if not (isinstance(own, list) and isinstance(likeliest, list)):
            return None
        tokens = [] if tokens is None else tokens
        if not isinstance(tokens, list) or not all(text is None or isinstance(text, str) for text in tokens):
            raise ValueError("tokens are no list of texts")
        if len(likeliest) != len(own) or len(tokens) not in (0, len(own)):
            raise ValueError(f"{len(tokens)} tokens, {len(own)} token_logprobs and {len(likeliest)} top_logprobs")
        return cls(
            tokens,
            [None if value is None else _number("token_logprobs", value) for value in own],
            [None if entry is None else _entry(entry) for entry in likeliest],
        )


def _entry(entry: Any) -> dict[str, float]:
    if not isinstance(entry, dict):
        raise ValueError(f"top_logprobs have {entry!r:.80}, expected an object of texts and numbers")
    return {text: _number("top_logprobs", value) for text, value in entry.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} have {value!r:.80}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} have an integer that is no float") from None


class CompletionsServer:
    """A server; use it as a context manager."""

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        """Connect to nothing yet.

        Args:
            base_url: with or without ``/v1``.
            model: that requests name; the server's first by default.
            api_key: sent as a bearer token.

        Raises:
            ConfigError: httpx is not installed, or the URL or the key is none.
        """
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            raise ConfigError(
                "--from URL needs httpx, which is not installed. Install it: pip install 'cardan[bench]'"
            ) from error
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--server-api-key holds what is no printable ASCII, which no header takes. Check it.")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        timeout = self._httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        try:
            self._client = self._httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout, trust_env=False)
        except self._httpx.InvalidURL as error:
            raise ConfigError(
                f"--from {base_url} is no URL that can be asked: {error}. Pass one such as http://host:8000."
            ) from error
        if not self._client.base_url.host:
            raise ConfigError(f"--from {base_url} names no host. Pass a URL such as http://host:8000.")
        self._model = model

    def __enter__(self) -> CompletionsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def model(self) -> str:
        """The model that requests name."""
        if self._model is None:
            listed = self._json("GET", "/v1/models", None)
            try:
                self._model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise ServerError(f"{self.base_url}/v1/models lists no model. Pass --server-model.") from error
        return self._model

    def complete(self, ids: Sequence[int], **fields: Any) -> Logprobs:
        """The logprobs of a greedy completion of token ids.

        Raises:
            ServerError: the server refuses, or gives no logprobs, or others than OpenAI's.
        """
        body = {"model": self.model, "prompt": list(ids), "temperature": 0, **fields}
        answer = self._json("POST", "/v1/completions", body)
        try:
            logprobs = Logprobs.of(answer)
        except ValueError as error:
            raise ServerError(
                f"{self.base_url} answers with other logprobs than OpenAI's completions have: {error}. "
                "Take another server."
            ) from error
        if logprobs is None:
            raise ServerError(
                f"{self.base_url} gives no logprobs with its completions. Start it so that it does, or take another."
            )
        return logprobs

    def _json(self, method: str, path: str, body: Any) -> Any:
        try:
            reply = self._client.request(method, path, json=body)
        except self._httpx.HTTPError as error:
            raise ServerError(f"{self.base_url} cannot be reached: {error}. Check the URL of --from.") from error
        if reply.status_code != 200:
            said = f"{self.base_url}{path} answers {reply.status_code}: {reply.text[:300]}"
            if reply.status_code == BAD_REQUEST and "logprobs" in reply.text:
                said += " If it gives fewer logprobs of a token, pass as many by --top, such as --top 20."
            raise ServerError(said)
        try:
            return reply.json()
        except ValueError as error:
            raise ServerError(f"{self.base_url}{path} answers with no JSON: {reply.text[:300]!r}") from error


def record_server(
    config: EngineConfig, server: CompletionsServer, wanted: Wanted, progress: Progress | None = None
) -> Golden:
    """A record from a server's logprobs. Every token is scored as part of a prompt that is echoed.

    Args:
        config: names the model here whose tokenizer the server's is.
        server: open.
        wanted: what is measured; layers and noise are not to be had.
        progress: told how far it is.

    Raises:
        ServerError: the server refuses, or gives no logprobs of prompts.
        ConfigError: the model here has no tokenizer.
    """
    tokenizer = tokenizer_for(config, required=True)
    assert tokenizer is not None
    cases = make_cases(wanted, tokenizer)
    by_text: dict[str, int] = {}
    for token in range(tokenizer.vocab_size):
        by_text.setdefault(tokenizer.token_text(token), token)
    recorded = []
    done, total = 0, sum(case.num_positions for case in cases)
    for case in cases:
        recorded.append(_record(server, case, wanted, tokenizer, by_text))
        done += case.num_positions
        if progress is not None:
            progress("positions", done, total)
    return Golden(
        fingerprint=Fingerprint(
            source="openai",
            platform=server.base_url,
            device="",
            model=server.model,
            architecture="",
            vocab_size=0,
            dtype="",
            tokenizer=tokenizer_print(tokenizer),
        ),
        cases=tuple(recorded),
        notes=("made from a server's logprobs: its tokens are known by their texts, and neither layers nor noise are",),
    )


def _record(
    server: CompletionsServer, case: Case, wanted: Wanted, tokenizer: Tokenizer, by_text: Mapping[str, int]
) -> Recorded:
    echoed = server.complete(case.ids, max_tokens=1, echo=True, logprobs=wanted.top)
    _check_tokenizer(echoed.tokens, case, tokenizer, server.base_url)
    free, text = None, ""
    if wanted.greedy:
        went_on = server.complete(case.ids[: case.num_prompt], max_tokens=case.greedy_tokens, logprobs=2)
        free = _greedy(went_on, by_text, server.base_url)
        text = text_of(tokenizer, free.ids.tolist())
    scores = _scores(echoed, case, wanted.top, by_text, server.base_url)
    scores.check(case.name)
    return Recorded(case=case, text=text_of(tokenizer, case.ids), scores=scores, greedy=free, greedy_text=text)


def _check_tokenizer(echoed: Sequence[str | None], case: Case, tokenizer: Tokenizer, url: str) -> None:
    """See that a server echoes what the ids stand for here; some name tokens otherwise, but not most of them.

    Raises:
        ServerError: they are mostly others.
    """
    pairs = [
        (text, tokenizer.token_text(token)) for text, token in zip(echoed, case.ids, strict=False) if text is not None
    ]
    others = [(theirs, ours) for theirs, ours in pairs if theirs.strip() != ours.strip()]
    if len(pairs) >= LEAST_TOKENS and 2 * len(others) > len(pairs):
        theirs, ours = others[0]
        raise ServerError(
            f"{url} echoes other tokens than it was asked about: {len(others)} of {len(pairs)} of prompt "
            f"{case.name!r}, the first {theirs!r} where --model's tokenizer has {ours!r}. "
            "Pass the server's model by --model, and another of its models by --server-model."
        )


def _scores(echoed: Logprobs, case: Case, top: int, by_text: Mapping[str, int], url: str) -> Scores:
    span = slice(case.score_from, len(case.ids))
    own = [value for value in echoed.own[span] if value is not None]
    alternatives = [entry for entry in echoed.likeliest[span] if entry is not None]
    if {len(own), len(alternatives)} != {case.num_positions}:
        raise ServerError(
            f"{url} gives no logprobs of prompts: {len(own)} of {case.num_positions} positions came with echo. "
            "Take a server whose completions echo prompts with logprobs."
        )
    ids = np.full((len(own), top), -1, np.int32)
    values = np.full((len(own), top), NO_LOGPROB)
    for row, entry in enumerate(alternatives):
        known = sorted(((value, by_text[name]) for name, value in entry.items() if name in by_text), reverse=True)
        for column, (value, token) in enumerate(known[:top]):
            ids[row, column], values[row, column] = token, value
        # no two columns may name the same token, and none a real one: what is not there counts as nothing
        ids[row, len(known[:top]) :] = -1 - np.arange(top - len(known[:top]))
    return Scores(
        logprobs=np.asarray(own, np.float32),
        top_ids=ids,
        top_logprobs=values.astype(np.float32),
        rest=rest_of(values),
    )


def _greedy(went_on: Logprobs, by_text: Mapping[str, int], url: str) -> Greedy:
    if None in (*went_on.own, *went_on.likeliest, *went_on.tokens) or len(went_on.tokens) != len(went_on.own):
        raise ServerError(f"{url} leaves out logprobs or texts of tokens that it chose. Take another server.")
    gaps = []
    for entry in filter(None, went_on.likeliest):
        best = sorted(entry.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else np.inf)
    return Greedy(
        ids=np.asarray([by_text.get(text or "", -1) for text in went_on.tokens], np.int32),
        logprobs=np.asarray(went_on.own, np.float32),
        margins=np.asarray(gaps, np.float32),
    )
