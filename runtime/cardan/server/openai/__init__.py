"""OpenAI's routes: chat, completions, embeddings, scores and responses."""
