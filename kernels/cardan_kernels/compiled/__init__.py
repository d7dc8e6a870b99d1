"""Compiles every kernel for real chips on a machine that has none, and says what each takes of the chip.

It knows no kernel: each folder of kernels lists its ``Variant``s in a module ``variants``.
"""

from cardan_kernels.compiled.variant import FOLDERS, Variant, empty, variants

__all__ = ["FOLDERS", "Variant", "empty", "variants"]
