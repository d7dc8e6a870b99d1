"""What each simulated call was modelled from, and which of the limits that stand there the simulator holds.

A limit is written as a part of the message that refuses what breaks it, so that a test finds it in the sources. What a
page says beyond that is not simulated: ``_attention`` and the others refuse calls that would need it.
"""

from __future__ import annotations

from dataclasses import dataclass

OP_PLUGIN = "op-plugin, docs/context: "
EXTENSION = "Ascend Extension for PyTorch 7.3.0, "
NATIVE = f"{EXTENSION}native APIs, torch-cuda.md: "
CHECKS = "torch_npu's source, torch_npu/csrc/distributed/ProcessGroupHCCL.cpp, its checks of tensors"
GRAPHS = f"{EXTENSION}developer notes, npugraph.md, and "


@dataclass(frozen=True, slots=True)
class Citation:
    """A page, and limits of it that are enforced."""

    page: str
    limits: tuple[str, ...] = ()


def _as_cuda(name: str, *limits: str) -> Citation:
    return Citation(f"{NATIVE}torch.cuda.{name}", limits)


OPERATORS = {
    "npu_fused_infer_attention_score": Citation(
        f"{OP_PLUGIN}torch_npu-npu_fused_infer_attention_score.md; CANN 8.5, aclnnFusedInferAttentionScoreV3",
        (
            "block_size must be a multiple of 16",
            "block_size must be at most 128 in layout TND",
            "block_size must be at most 512",
            "D must be a multiple of 16 up to 256 in layout TND",
            "D must be at most 512",
            "H must be num_key_value_heads * D",
            "at most 64 times",
            "num_heads must be at most 256",
            "the batch must be 1 to",
            "T must be at most",
            "actual_seq_lengths must be cumulative in layout TND",
            "the last of actual_seq_lengths must be T",
            "sparse_mode 0 takes no atten_mask in layout TND",
            "sparse_mode 3 needs less queries than keys",
            "atten_mask must be a lower triangle",
            "block_table names blocks outside",
            "inner_precise must be 0 or 1",
            "inner_precise must be 0 in layout TND, but for float16",
            "where a row has several queries",
            "the cache must have as many blocks as all rows together",
            "key and value must have at most ",
            "pre_tokens must not be below minus the queries of a row",
            "next_tokens must not be below minus the keys of a row",
            "atten_mask must be contiguous",
        ),
    ),
    "npu_rms_norm": Citation(
        f"{OP_PLUGIN}torch_npu-npu_rms_norm.md",
        ("gamma must have the type of the input", "gamma must have the last dimensions of the input"),
    ),
    "npu_add_rms_norm": Citation(
        f"{EXTENSION}custom APIs, torch_npu.npu_add_rms_norm", ("x1 and x2 must have the same shape and type",)
    ),
    "npu_rotary_mul": Citation(
        f"{OP_PLUGIN}torch_npu-npu_rotary_mul.md",
        (
            "input, r1 and r2 must have four dimensions",
            "r1 and r2 must be within -1 .. 1",
            "D must be even and below 896",
            "B and N must be below 1000",
            "B * N must be below 1000 in mode interleave",
        ),
    ),
    "npu_swiglu": Citation(
        f"{OP_PLUGIN}torch_npu-npu_swiglu.md", ("input must not be empty", "must be even", "input must be contiguous")
    ),
    "npu_scatter_nd_update_": Citation(
        f"{OP_PLUGIN}torch_npu-npu_scatter_nd_update_.md",
        (
            "indices must have two dimensions at least",
            "the last dimension of indices must be at most the rank of self",
            "updates must have the type of self",
            "updates must be ",
            "indices must be in 0 .. ",
        ),
    ),
    "npu_dynamic_quant": Citation(
        f"{OP_PLUGIN}torch_npu-npu_dynamic_quant.md", ("x must have more than one dimension",)
    ),
    "npu_quantize": Citation(
        f"{OP_PLUGIN}torch_npu-npu_quantize.md",
        ("scales must have one dimension", "zero_points", "dtype must be qint8, quint8 or int32"),
    ),
    "npu_quant_matmul": Citation(
        f"{OP_PLUGIN}torch_npu-npu_quant_matmul.md, with its table of types for Atlas A2 and A3, and "
        "CANN 8.5, aclnnTransQuantParamV2",
        (
            "x1 and x2 must not be empty",
            "the last dimensions must be at most",
            "scale must be [1] or ",
            "pertoken_scale must be [",
            "bias must have one dimension, as long as",
            "scale for bfloat16 results",
            "scale for float16 results with pertoken_scale",
            "float16 results without pertoken_scale go through npu_trans_quant_param",
        ),
    ),
    "npu_weight_quant_batchmatmul": Citation(
        f"{OP_PLUGIN}torch_npu-npu_weight_quant_batchmatmul.md",
        (
            "K and N must be at most",
            "antiquant_scale must have the type of x",
            "antiquant_group_size must be a multiple of 32",
            "weight in FRACTAL_NZ is for graphs of torch.compile only",
            "bias must be contiguous, one of",
        ),
    ),
    "npu_convert_weight_to_int4pack": Citation(
        f"{OP_PLUGIN}torch_npu-npu_convert_weight_to_int4pack.md", ("the last dimension must be a multiple of 8",)
    ),
    "npu_format_cast": Citation(f"{EXTENSION}custom APIs, torch_npu.npu_format_cast", ("it is not for capture",)),
    "get_npu_format": Citation(f"{EXTENSION}custom APIs, torch_npu.get_npu_format"),
}
"""Functions of ``torch_npu`` itself."""

DEVICE = {
    "NPUGraph": Citation(
        f"{GRAPHS}custom APIs, torch_npu.npu.NPUGraph",
        (
            "another capture is under way",
            "the host cannot wait for a stream that is being captured",
            "copy_() before a replay",
            "memory that the graph reads or writes was given back",
            "streams of the device are used up",
        ),
    ),
    "NPUGraph.update": Citation(
        f"{GRAPHS}custom APIs, NPUGraph.update (cpu_update_input)",
        (
            "wait for NPUGraph.update(), which did not come",
            "the graph must be captured with auto_dispatch_capture=True",
            "cpu_update_input must have 1 or ",
            "from the host, got ",
        ),
    ),
    "graph": Citation(f"{GRAPHS}custom APIs, torch_npu.npu.graph"),
    "graph_pool_handle": _as_cuda("graph_pool_handle"),
    "Stream": _as_cuda("Stream"),
    "Event": _as_cuda("Event", "both must be recorded"),
    "synchronize": _as_cuda("synchronize", "the host cannot wait for a stream that is being captured"),
    "stream": _as_cuda("stream"),
    "current_stream": _as_cuda("current_stream"),
    "set_device": _as_cuda("set_device", "there is one device, 0"),
    "current_device": _as_cuda("current_device"),
    "device_count": _as_cuda("device_count"),
    "is_available": _as_cuda("is_available"),
    "get_device_name": _as_cuda("get_device_name"),
    "get_device_properties": _as_cuda("get_device_properties"),
    "mem_get_info": _as_cuda("mem_get_info"),
    "memory_allocated": _as_cuda("memory_allocated"),
    "memory_reserved": _as_cuda("memory_reserved"),
    "max_memory_allocated": _as_cuda("max_memory_allocated"),
    "reset_peak_memory_stats": _as_cuda("reset_peak_memory_stats"),
    "empty_cache": _as_cuda("empty_cache"),
    "manual_seed_all": _as_cuda("manual_seed_all"),
}
"""What ``torch.npu`` has."""

COLLECTIVES = {
    "allreduce": Citation(
        f"{OP_PLUGIN}c10d_npu-ProcessGroupHCCL.md; CANN 8.5, HCCL API, HcclAllReduce; {CHECKS}",
        ("Tensors must be NPU and dense", "Tensors must be contiguous"),
    ),
    "allgather": Citation(
        f"{OP_PLUGIN}c10d_npu-ProcessGroupHCCL.md; CANN 8.5, HCCL API, HcclAllGather; {CHECKS}",
        (
            "Tensors must be NPU and dense",
            "Tensors must be contiguous",
            "every output must have the shape of the input",
        ),
    ),
}
"""What ranks of a group of ``hccl`` call."""
