"""The native routes: ``/generate``, health, administration and tools for texts."""
