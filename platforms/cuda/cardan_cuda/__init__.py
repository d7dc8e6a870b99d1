"""NVIDIA's GPUs as a platform: torch and Triton, and FlashInfer where it is installed.

It knows no model. Importing it imports neither torch nor a kernel.
"""

from cardan_cuda.cuda_platform import CudaPlatform, platform

__all__ = ["CudaPlatform", "platform"]
