"""From logits to tokens in a fixed number of launches of fixed shape."""
