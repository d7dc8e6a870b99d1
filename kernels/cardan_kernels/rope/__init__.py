"""Rotary position embedding, and writing keys and values into a paged pool.

It knows no model and no attention.
"""

from cardan_kernels.rope.rotation import Rotation, rope, rope_and_write_kv, write_kv

__all__ = ["Rotation", "rope", "rope_and_write_kv", "write_kv"]
