"""The page at ``/``: a chat with the model and a live view of the engine, a few files that need no build step."""
