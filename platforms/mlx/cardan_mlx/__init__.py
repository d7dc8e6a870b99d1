"""Apple's MLX as a platform: Metal on macOS, MLX's CPU build on Linux.

It knows no model. Importing it imports no array library.
"""

from cardan_mlx.mlx_platform import MlxPlatform, platform

__all__ = ["MlxPlatform", "platform"]
