"""How much of an NPU's memory is for what: cards have 32 or 64 GB.

It asks no device and imports no torch.
"""

from __future__ import annotations

from cardan_torch import GIB, MIB, OwnMemory, Tier

TOP_BUCKET = "graph_max_rows"

NPU_MEMORY = OwnMemory(
    device="an NPU",
    tiers=(
        Tier(below=24 * GIB, head_room=512 * MIB, top_bucket=16, chunk=2048, rows=32),
        Tier(below=48 * GIB, head_room=1536 * MIB, top_bucket=16, chunk=4096, rows=128),
        Tier(below=2**63, head_room=3072 * MIB, top_bucket=64, chunk=8192, rows=256),
    ),
    graph_bytes=8 * MIB,
    graph_share=0.25,
    head_room="operators' workspaces, HCCL's and CANN's buffers, and fragments",
    top_option=TOP_BUCKET,
)
