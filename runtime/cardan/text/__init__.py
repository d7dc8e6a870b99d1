"""Text in and out of the engine: tokenizer, incremental detokenizer, stop conditions, chat templates.

It knows neither requests in flight nor HTTP, and imports no array library.
"""
