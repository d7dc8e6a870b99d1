"""What tests and vendors run against: the null platform, a tiny model folder, and the conformance suite.

It knows nothing of a real device; everything here is shipped, so that a plugin's own tests can use it.
"""

from cardan.testing.tiny_model import null_model_folder, write_tiny_model

__all__ = ["null_model_folder", "write_tiny_model"]
