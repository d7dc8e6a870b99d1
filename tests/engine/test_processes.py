"""How the child processes start: what they leave to the garbage collector, and what they do at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

START_AND_END = """
import gc, importlib, sys, threading, zmq
from pathlib import Path
from cardan.engine.channels import FRONTEND_INBOX, Outbox, open_inbox
from cardan.engine.messages import Shutdown, encode
from cardan.engine.options import config_from_options
role, folder, model = sys.argv[1:]
process = importlib.import_module(f"cardan.engine.{role}_process")
load = process.load_model_tokenizer
loaded_by = []
def watched(*args, **kwargs):
    loaded_by.append(threading.current_thread() is threading.main_thread())
    return load(*args, **kwargs)
process.load_model_tokenizer = watched
context = zmq.Context()
inbox = open_inbox(context, Path(folder), FRONTEND_INBOX)
outbox = Outbox(context, Path(folder), role)
outbox.send(encode(Shutdown()))
code = process.run(config_from_options({"platform": "null", "model": model}), Path(folder))
print(code, gc.get_freeze_count() > 10_000, *loaded_by, flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_what_a_process_starts_with_is_never_walked_again(tiny_model, tmp_path, role):
    """A full collection takes 100 ms and more with a platform's library loaded, and every stream waits for it."""
    command = [sys.executable, "-c", START_AND_END, role, str(tmp_path), str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    beside = str(role == "detokenizer")
    assert done.stdout.split() == ["0", "True", beside], done.stderr
