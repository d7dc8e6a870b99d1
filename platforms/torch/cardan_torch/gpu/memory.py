"""How much of a GPU's memory is for what, by its size.

It asks no device and imports no torch.
"""

from __future__ import annotations

from cardan_torch.own_memory import GIB, MIB, OwnMemory, Tier

TOP_BUCKET = "cuda_graph_max_bs_decode"

GPU_MEMORY = OwnMemory(
    device="a GPU",
    tiers=(
        Tier(below=12 * GIB, head_room=512 * MIB, top_bucket=16, chunk=1024, rows=32),
        Tier(below=20 * GIB, head_room=768 * MIB, top_bucket=32, chunk=2048, rows=64),
        Tier(below=36 * GIB, head_room=1024 * MIB, top_bucket=64, chunk=2048, rows=128),
        Tier(below=60 * GIB, head_room=1536 * MIB, top_bucket=128, chunk=4096, rows=256),
        Tier(below=100 * GIB, head_room=2048 * MIB, top_bucket=256, chunk=8192, rows=512),
        Tier(below=2**63, head_room=3072 * MIB, top_bucket=256, chunk=8192, rows=512),
    ),
    graph_bytes=24 * MIB,
    graph_share=0.25,
    head_room="the runtime, libraries and fragments",
    top_option=TOP_BUCKET,
)
