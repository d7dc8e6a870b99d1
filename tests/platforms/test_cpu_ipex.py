"""Attention by IPEX without IPEX: what is said where it is missing, and what its call is given.

``make test-ipex`` runs the conformance suite over the real one. The stand-in computes what its docstring says.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cardan.errors import UnsupportedError  # noqa: E402
from cardan.platform import AttentionMeta, Capabilities, DeviceInfo, Evidence, Support  # noqa: E402
from cardan.platform.refusals import refuse_choice  # noqa: E402
from cardan.types import ForwardMode, KVLayout, LayerKV, TableDelta  # noqa: E402
from cardan_cpu import ipex, ipex_attention  # noqa: E402
from cardan_cpu.device import CpuDevice  # noqa: E402
from cardan_cpu.features import native_features, torch_features  # noqa: E402
from cardan_cpu.host import read_host  # noqa: E402

SLOTS, ROWS, LENGTH = 64, 4, 16


class PagedAttention:
    """The call over pages ``[blocks, heads, block_size, dim]``, in float64."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def single_query_cached_kv_attention(
        cls, out, query, keys, values, heads, scale, tables, lengths, block_size, longest, alibi, **options
    ):
        cls.calls.append("decode")
        assert (block_size, alibi, int(lengths.max())) == (1, None, longest)
        assert keys.shape[1] == int(heads.max()) + 1
        assert not (options["window_size"] > 0 and options["softcap"] > 0)
        starts = torch.arange(len(lengths) + 1)
        window = options["window_size"]
        cls.attend(out, query, (keys, values), (starts, lengths, tables), scale, (window, options["softcap"]))

    @staticmethod
    def attend(out, query, caches, rows, scale, limits):
        window, softcap = limits
        starts, lengths, tables = rows
        assert tables.dtype is torch.int32
        for row, length in enumerate(lengths.tolist()):
            first, last = int(starts[row]), int(starts[row + 1])
            slots = tables[row, :length].long()
            keys, values = (cache[slots, :, 0].double() for cache in caches)
            shared = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), keys) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            ahead = torch.arange(length) - (torch.arange(last - first)[:, None] + length - (last - first))
            hidden = (ahead > 0) | ((-ahead >= window) if window > 0 else False)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> type[PagedAttention]:
    """IPEX as far as it is called."""
    names = (ipex.MODULE, f"{ipex.MODULE}.llm", f"{ipex.MODULE}.llm.modules")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].PagedAttention = PagedAttention  # type: ignore[attr-defined]
    monkeypatch.setattr(ipex, "why_not_ipex", lambda: None)
    monkeypatch.setattr(ipex_attention, "why_not_ipex", lambda: None)
    PagedAttention.calls = []
    return PagedAttention


def attended(
    name: str,
    layer: LayerKV,
    step: tuple[list[int], list[int]],
    sinks: Any = None,
    types: tuple[str, str] = ("float32", "float32"),
    page_size: int = 1,
) -> np.ndarray:
    """What a backend makes of a step whose rows have so many queries and keys, over a pool at random.

    ``types`` are those of activations and of keys and values.
    """
    counts, lengths = step
    rng = np.random.default_rng(6)
    activations, kept = types
    wide = getattr(torch, activations)
    layout = KVLayout(layers=(layer,), page_size=page_size, dtype=kept)
    device = CpuDevice(DeviceInfo(index=0, name="some CPU", detail="", total_memory=1), 1)
    pool = device.allocate_kv(layout, SLOTS, ROWS, LENGTH)
    for leaf in pool.leaves():
        leaf.copy_(torch.from_numpy(rng.normal(size=tuple(leaf.shape)).astype(np.float32)))
    pages = 1 + rng.permutation(SLOTS // page_size - 1)[: len(lengths) * LENGTH // page_size]
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(len(lengths), LENGTH).astype(np.int32)
    pool.update_tables([TableDelta(row_id=row, start=0, slots=slots[row][None]) for row in range(len(lengths))])
    places = [np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    meta = AttentionMeta(
        mode=ForwardMode.DECODE if max(counts) == 1 else ForwardMode.EXTEND,
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        row_ids=np.arange(len(lengths), dtype=np.int32),
        positions=np.concatenate(places).astype(np.int32),
        out_slots=np.concatenate([slots[row][place] for row, place in enumerate(places)])[None].astype(np.int32),
    )
    heads = ((layer.q_heads, layer.k_dim), (layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim))
    q, k, v = (torch.from_numpy(rng.normal(size=(sum(counts), *each)).astype(np.float32)).to(wide) for each in heads)
    backend = device.attention(name, pool, layout, activations)
    return backend.forward(q, k, v, layer, backend.plan(meta), sinks).reshape(sum(counts), -1).float().numpy()


def layer(**changes: Any) -> LayerKV:
    return LayerKV(**{"index": 0, "q_heads": 4, "kv_heads": 2, "k_dim": 8, "v_dim": 8, "scale": 0.4, **changes})


@pytest.mark.parametrize("name", ["ipex", "torch"])
def test_where_native_kernels_compute_the_way_to_others_is_said(name):
    capabilities = Capabilities(features=native_features("avx2"), page_sizes=(1,))
    with pytest.raises(UnsupportedError, match=rf"got '{name}' \(it goes with .*--platform-option kernels=torch\)"):
        refuse_choice("--attention-backend", name, "attention", "cpu", capabilities)


STEPS = {"decode": ([1, 1, 1], [9, 1, 16]), "extend": ([5, 1, 7], [9, 12, 7])}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"softcap": 2.0}], ids=["full", "window", "softcap"])
def test_decode_goes_to_the_call_and_prompts_by_torch(installed, step, changes):
    got = attended("ipex", layer(**changes), STEPS[step])
    assert installed.calls == ["decode"] * (step == "decode")
    np.testing.assert_allclose(got, attended("torch", layer(**changes), STEPS[step]), atol=2e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("types", "taken"),
    [
        (("float32", "float32"), True),
        (("bfloat16", "bfloat16"), True),
        (("bfloat16", "float32"), False),
        (("float32", "fp8_e4m3"), False),
        (("bfloat16", "fp8_e5m2"), False),
    ],
)
def test_decode_goes_to_the_call_where_keys_have_the_type_of_activations(installed, step, page_size, types, taken):
    got = attended("ipex", layer(), STEPS[step], types=types, page_size=page_size)
    assert installed.calls == ["decode"] * (taken and step == "decode")
    want = attended("torch", layer(), STEPS[step], types=types, page_size=page_size)
    if not installed.calls:
        np.testing.assert_array_equal(got, want)
    # both are rounded once to the type of activations, at the end; torch may round weights too
    unit = 2.0**-8 if types[0] == "bfloat16" else 2.0**-19
    np.testing.assert_allclose(got, want, atol=2 * unit * np.abs(want).max())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("changes", "sinks"),
    [({"v_dim": 4}, None), ({"window": 1}, None), ({"window": 3, "softcap": 2.0}, None), ({"sinks": True}, 4)],
    ids=["values-less-wide", "window-of-one", "window-and-softcap", "sinks"],
)
def test_what_ipex_does_not_take_goes_by_torch(installed, step, changes, sinks):
    given = None if sinks is None else torch.linspace(-1, 1, sinks)
    got = attended("ipex", layer(**changes), STEPS[step], sinks=given)
    assert installed.calls == []
    np.testing.assert_array_equal(got, attended("torch", layer(**changes), STEPS[step], sinks=given))


def test_without_ipex_the_answer_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(ipex.util, "find_spec", lambda name: None)
    answer = torch_features(read_host())["attention:ipex"]
    assert answer.support is Support.UNSUPPORTED
    assert answer.reason == "intel-extension-for-pytorch is not installed; its last release, 2.8, needs torch 2.8"
    assert answer.alternative == "Pass --attention-backend torch"
    with pytest.raises(UnsupportedError, match=r"Attention by IPEX cannot run: intel-extension-for-pytorch is not"):
        attended("ipex", layer(), STEPS["decode"])


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (("2.8.0", "2.8.0+cpu"), None),
        (("2.8.0", "2.13.0+cpu"), "intel-extension-for-pytorch 2.8 needs torch 2.8, and here is torch 2.13"),
        (
            (None, "2.8.0"),
            f"the version of {ipex.PACKAGE} cannot be read: install both with pip, in releases of one number",
        ),
        (("2.8.0", None), "the version of torch cannot be read: install both with pip, in releases of one number"),
        (
            (None, None),
            f"the version of {ipex.PACKAGE} and torch cannot be read: install both with pip, in releases of one number",
        ),
    ],
)
def test_releases_must_be_those_of_one_number(monkeypatch, versions, said):
    found = dict(zip(("intel-extension-for-pytorch", "torch"), versions, strict=True))

    def version(name: str) -> str:
        if found[name] is None:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(ipex.util, "find_spec", lambda name: object())
    monkeypatch.setattr(ipex.metadata, "version", version)
    assert ipex.why_not_ipex() == said
    assert (ipex.ipex_capability().support is Support.NATIVE) == (said is None)


def test_the_evidence_is_what_the_page_bears_out(installed):
    """Hardware, where it says that the suite ran by IPEX itself; the stand-in here is a simulator."""
    page = (Path(__file__).parents[2] / "docs" / "platforms" / "ipex.md").read_text(encoding="utf-8")
    verified = page.split("<!-- verified:begin -->")[1].split("<!-- verified:end -->")[0]
    ran = re.search(r"20\d\d-\d\d-\d\d, .*, IPEX 2\.8.*: [1-9]\d* checks of the suite passed, none failed", verified)
    wanted = Evidence.HARDWARE if ran else Evidence.SIMULATOR
    assert ipex.ipex_capability().evidence is wanted


def test_an_import_that_breaks_is_said_with_what_broke(installed, monkeypatch):
    def broken(name: str) -> Any:
        raise NameError("name 'MoeModelOutputWithPast' is not defined")

    monkeypatch.setattr(ipex_attention.importlib, "import_module", broken)
    with pytest.raises(UnsupportedError, match=r"NameError: name 'MoeModelOutputWithPast' is not defined.*uninstall"):
        attended("ipex", layer(), STEPS["decode"])
