"""What every GPU that torch and Triton program has in common: streams, graphs, pools, attention, ops, memory.

It knows no vendor: what differs between chips stands in the platforms that derive from ``GpuDevice``. Importing it
imports no kernel.
"""
