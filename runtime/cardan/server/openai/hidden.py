"""The hidden state of a choice's last computed token, as OpenAI's forms show it where a request asks for it.

It does not know where hidden states come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cardan.server.openai.bodies import OpenAIBody


def shown_state(body: OpenAIBody, state: bytes) -> dict[str, Any]:
    """``hidden_states``: one vector; nothing where it was not asked for."""
    if not body.return_hidden_states:
        return {}
    return {"hidden_states": np.frombuffer(state, dtype=np.float32).tolist()}
