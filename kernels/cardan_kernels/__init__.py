"""Triton kernels for GPUs: attention over paged keys and values, rotations, norms, gates, linears and sampling.

They know no model, no scheduler and no platform: torch tensors in, torch tensors out. Importing this package loads
nothing; each kind of kernel is a package of its own.
"""
