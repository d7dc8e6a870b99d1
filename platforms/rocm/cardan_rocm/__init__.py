"""AMD's GPUs as a platform: torch and Triton, and AITER where it is installed.

It knows no model. Importing it imports neither torch nor a kernel.
"""

from cardan_rocm.rocm_platform import RocmPlatform, platform

__all__ = ["RocmPlatform", "platform"]
