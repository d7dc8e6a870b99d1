"""Anthropic's ``/v1/messages`` and its count of tokens."""
