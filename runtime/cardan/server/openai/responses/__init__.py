"""OpenAI's ``/v1/responses``: created, streamed, kept, asked for again and cancelled."""
