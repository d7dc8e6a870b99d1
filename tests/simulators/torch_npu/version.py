"""The version whose documented behaviour the simulator has."""

__version__ = "2.8.0.post4"
