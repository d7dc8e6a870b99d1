"""Load generator and offline benchmark: workloads, targets, measurements.

It prints nothing and knows no platform; the CLI shows what it returns.
"""
