"""What every torch device shares: eager ops, tensors, KV pools and attention over slots."""
