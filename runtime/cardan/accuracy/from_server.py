"""Makes a golden record from the logprobs of any server that speaks OpenAI's completions.

It needs httpx, which the ``bench`` extra brings. Such servers name tokens by their texts; a text that stands for no
token of the tokenizer counts among the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
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
NO_LOGPROB = -100.0
"""Stands for alternatives that a server leaves out: a probability of nothing."""


class ServerError(CardanError):
    """The server refused a request, or its answer lacks what a record needs."""


class CompletionsServer:
    """A server; use it as a context manager."""

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        """Connect to nothing yet.

        Args:
            base_url: with or without ``/v1``.
            model: that requests name; the server's first by default.
            api_key: sent as a bearer token.

        Raises:
            ConfigError: httpx is not installed.
        """
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            raise ConfigError(
                "--from URL needs httpx, which is not installed. Install it: pip install 'cardan[bench]'"
            ) from error
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._client = self._httpx.Client(base_url=self.base_url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
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

    def complete(self, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        """The logprobs of a greedy completion of token ids.

        Raises:
            ServerError: the server refuses, or gives no logprobs.
        """
        body = {"model": self.model, "prompt": list(ids), "temperature": 0, **fields}
        answer = self._json("POST", "/v1/completions", body)
        try:
            logprobs: dict[str, Any] = answer["choices"][0]["logprobs"]
            assert isinstance(logprobs["token_logprobs"], list)
            assert isinstance(logprobs["top_logprobs"], list)
        except (KeyError, IndexError, TypeError, AssertionError) as error:
            raise ServerError(
                f"{self.base_url} gives no logprobs with its completions. Start it so that it does, or take another."
            ) from error
        return logprobs

    def _json(self, method: str, path: str, body: Any) -> Any:
        try:
            reply = self._client.request(method, path, json=body)
        except self._httpx.HTTPError as error:
            raise ServerError(f"{self.base_url} cannot be reached: {error}. Check the URL of --from.") from error
        if reply.status_code != 200:
            raise ServerError(f"{self.base_url}{path} answers {reply.status_code}: {reply.text[:300]}")
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
        try:
            recorded.append(_record(server, case, wanted, tokenizer, by_text))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ServerError(
                f"{server.base_url} answers with other logprobs than OpenAI's completions have ({error!r}). "
                "Take another server."
            ) from error
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
    free, text = None, ""
    if wanted.greedy:
        went_on = server.complete(case.ids[: case.num_prompt], max_tokens=case.greedy_tokens, logprobs=2)
        free = _greedy(went_on, by_text)
        text = text_of(tokenizer, free.ids.tolist())
    scores = _scores(echoed, case, wanted.top, by_text, server.base_url)
    scores.check(case.name)
    return Recorded(case=case, text=text_of(tokenizer, case.ids), scores=scores, greedy=free, greedy_text=text)


def _scores(echoed: Mapping[str, Any], case: Case, top: int, by_text: Mapping[str, int], url: str) -> Scores:
    span = slice(case.score_from, len(case.ids))
    own, alternatives = echoed["token_logprobs"][span], echoed["top_logprobs"][span]
    if len(own) != case.num_positions or any(entry is None for entry in (*own, *alternatives)):
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


def _greedy(went_on: Mapping[str, Any], by_text: Mapping[str, int]) -> Greedy:
    gaps = []
    for entry in went_on["top_logprobs"]:
        best = sorted(entry.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else np.inf)
    return Greedy(
        ids=np.asarray([by_text.get(text, -1) for text in went_on["tokens"]], np.int32),
        logprobs=np.asarray(went_on["token_logprobs"], np.float32),
        margins=np.asarray(gaps, np.float32),
    )
