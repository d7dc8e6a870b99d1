"""HTTP below every API: bodies, replies, streams, keys and connections. It knows no model."""
