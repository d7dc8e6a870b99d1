"""Activations as codes of 8 bits, with a scale for each token or group of it."""
