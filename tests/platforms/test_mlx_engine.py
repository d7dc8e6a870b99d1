"""Whole engines on MLX: every request field gives what the CPU platform gives, in the plain and the overlapped loop.

Two platforms are compared with each other here. That a platform's tokens are those of the numpy reference model is
what the conformance suite holds (``end_to_end``)."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest

mx = pytest.importorskip("mlx.core")

from field_requests import LOGPROBS, PARAMS, answers, assert_same, run, start  # noqa: E402

from cardan.testing import write_tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("mlx") / "tiny", context_length=512)


@pytest.fixture(scope="module")
def plain(tiny_model):
    return answers(tiny_model, "mlx", overlap=False)


def test_every_request_field_gives_what_the_cpu_platform_gives(tiny_model, plain):
    pytest.importorskip("torch")
    assert_same(answers(tiny_model, "cpu", overlap=False), plain)


def test_the_requests_differ_from_greedy_ones(plain):
    """So that a field that is ignored would be noticed."""
    assert len({tuple(tokens[:10]) for tokens, *_ in plain.values()}) == len(PARAMS)
    for name, (tokens, logprobs, prompt, reasons) in plain.items():
        assert tokens
        assert len(reasons) == 1
        wanted = LOGPROBS.get(name)
        assert len(logprobs) == (len(tokens) if wanted else 0)
        assert bool(prompt) == (wanted is not None and wanted.prompt_start is not None)
    assert {kind for _, _, _, ((kind, _),) in plain.values()} >= {"stop", "length"}


@pytest.mark.parametrize(
    "layout", [{}, {"chunk": 7}, {"mixed": True, "chunk": 16}, {"pool": 420, "chunk": 16}, {"rows": 3}], ids=str
)
def test_the_overlapped_loop_gives_the_same_tokens(tiny_model, plain, layout):
    assert_same(answers(tiny_model, "mlx", overlap=True, **layout), plain)


def test_the_next_step_is_launched_before_the_last_is_read(tiny_model, monkeypatch):
    core, prepared = start(tiny_model, "mlx")
    assert prepared.plan.overlap
    in_flight, most = 0, 0
    launch = prepared.runner.launch

    def counted(batch):
        nonlocal in_flight, most
        step = launch(batch)
        in_flight += 1
        most = max(most, in_flight)
        read = step.result

        def result():
            nonlocal in_flight
            in_flight -= 1
            return read()

        step.result = result
        return step

    monkeypatch.setattr(prepared.runner, "launch", counted)
    run(core, ("greedy-long", "plain-draw"))
    prepared.close()
    assert most == 2


def test_nothing_is_read_between_a_launch_and_its_result(tiny_model, monkeypatch):
    from cardan_mlx import device as mlx_device
    from cardan_mlx import ops as mlx_ops

    waiting, early = False, 0

    def counted(x):
        nonlocal early
        early += not waiting
        return to_numpy(x)

    to_numpy = mlx_ops.to_numpy
    monkeypatch.setattr(mlx_ops, "to_numpy", counted)
    monkeypatch.setattr(mlx_device, "to_numpy", counted)
    core, prepared = start(tiny_model, "mlx")
    launch = prepared.runner.launch

    def wrapped(batch):
        step = launch(batch)
        read = step.result

        def result():
            nonlocal waiting
            waiting = True
            try:
                return read()
            finally:
                waiting = False

        step.result = result
        return step

    monkeypatch.setattr(prepared.runner, "launch", wrapped)
    early = 0
    drawn = run(core, tuple(PARAMS))
    prepared.close()
    assert early == 0
    assert all(tokens for tokens, *_ in drawn.values())


def write_weights(folder, config, bits, kind):
    """Random weights of a llama: every matrix in groups of 64 (``groups``), as the dense values of the same groups
    (``values``), or as what these were made from (``source``)."""
    (folder / "config.json").write_text(json.dumps(config))
    width, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    shared, wide = config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
    shapes = {"model.embed_tokens": (config["vocab_size"], width)}
    tensors = {"model.norm.weight": mx.ones(width)}
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        shapes |= {
            at + "self_attn.q_proj": (heads, width),
            at + "self_attn.k_proj": (shared, width),
            at + "self_attn.v_proj": (shared, width),
            at + "self_attn.o_proj": (width, heads),
            at + "mlp.gate_proj": (wide, width),
            at + "mlp.up_proj": (wide, width),
            at + "mlp.down_proj": (width, wide),
        }
        tensors |= {at + name + ".weight": mx.ones(width) for name in ("input_layernorm", "post_attention_layernorm")}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        values = mx.random.normal(shape, key=mx.random.key(number)) * (2.0 / shape[1] ** 0.5)
        if kind == "source":
            tensors[f"{name}.weight"] = values
            continue
        words, scales, biases = mx.quantize(values.astype(mx.float16 if bits == 4 else mx.float32), 64, bits)
        if kind == "groups":
            tensors |= {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
        else:
            wide_parts = scales.astype(mx.float32), biases.astype(mx.float32)
            tensors[f"{name}.weight"] = mx.dequantize(words, *wide_parts, group_size=64, bits=bits)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def wider_folder(folder, bits, kind):
    """A tiny llama whose rows hold whole groups, with weights in a file."""
    write_tiny_model(folder, context_length=512)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    if kind == "groups":
        config["quantization"] = {"bits": bits, "group_size": 64}
    return write_weights(folder, config, bits, kind)


def test_weights_quantized_at_load_are_smaller_and_give_what_their_values_give(tmp_path):
    core, prepared = start(
        wider_folder(tmp_path / "source", 8, "source"), "mlx", quantization="mlx_q8", random_weights=None
    )
    dense_core, dense = start(wider_folder(tmp_path / "values", 8, "values"), "mlx", random_weights=None)
    assert prepared.plan.settings["quantization"].why == "--quantization; made at load"
    ropes = sum(cos.nbytes + sin.nbytes for cos, sin, _ in dense.loaded.ropes)
    assert prepared.loaded.weight_bytes - ropes < 0.4 * (dense.loaded.weight_bytes - ropes)
    got, want = run(core, ("greedy", "top-k")), run(dense_core, ("greedy", "top-k"))
    prepared.close()
    dense.close()
    assert_same(got, want)
    unquantized = answers(tmp_path / "source", "mlx", ("greedy",), random_weights=None)
    assert got["greedy"][1][0].logprob != unquantized["greedy"][1][0].logprob


def test_a_checkpoint_of_affine_groups_gives_what_its_dense_values_give(tmp_path):
    folders = [wider_folder(tmp_path / kind, 4, kind) for kind in ("groups", "values")]
    core, prepared = start(folders[0], "mlx", random_weights=None)
    assert dict(prepared.plan.model.weight_formats) == {"AFFINE4_64_F16": 15, "F32": 5}
    assert all(item.native for item in prepared.plan.formats)
    groups = run(core, ("greedy", "top-k"))
    prepared.close()
    dense = answers(folders[1], "mlx", ("greedy", "top-k"), random_weights=None)
    for name in ("greedy", "top-k"):
        assert groups[name][0] == dense[name][0]
    assert_same({"greedy": groups["greedy"]}, {"greedy": dense["greedy"]})
    if find_spec("torch") is not None:
        exact = ("activations=float",)
        widened = answers(folders[0], "cpu", ("greedy",), random_weights=None, options=exact)
        assert_same({"greedy": groups["greedy"]}, widened)


def test_the_whole_path_imports_no_torch(tiny_model):
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from cardan.engine import Engine\n"
        f"engine = Engine(model={str(tiny_model)!r}, platform='mlx', random_weights=5, log_level='error',\n"
        "                max_total_tokens=512, max_running_requests=2)\n"
        "with engine:\n"
        "    out = engine.generate('hello', {'temperature': 0.7, 'seed': 1, 'max_new_tokens': 5, 'ignore_eos': True})\n"
        "print(len(out['output_ids']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "5"
