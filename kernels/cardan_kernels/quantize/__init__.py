"""Activations as codes of 8 bits, with a scale for each row or group of it."""

from cardan_kernels.quantize.rows import GROUP, LARGEST, quantize_rows

__all__ = ["GROUP", "LARGEST", "quantize_rows"]
