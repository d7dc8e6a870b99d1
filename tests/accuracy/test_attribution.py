"""Attribution's own rules: how errors are measured, what counts as the carrier, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints
from accuracy_tiny import tiny_cases, tiny_config

from cardan.accuracy.attribution import Found, conclude
from cardan.accuracy.attribution_report import Deviation, Tap, Trial, layer_of
from cardan.accuracy.comparison import Comparison, compare
from cardan.accuracy.references import GROUPS, MOST, References, error
from cardan.accuracy.report import render
from cardan.accuracy.session import Session
from cardan.accuracy.switches import WidenedCheckpoint, switches
from cardan.accuracy.watching import Call
from cardan.cli import app
from cardan.errors import CardanError
from cardan.ops import ReferenceOps
from cardan.types import LayerKV

BASE = {"mean": 1e-3, "p99": 1e-2, "max": 1e-1, "positions": 99.0}


def trial(feature: str, left: float, gone: bool = False, note: str = "") -> Trial:
    how = "by their references" if feature in GROUPS else f"{feature} is off"
    return Trial(feature=feature, how=how, kl_mean=left, kl_max=left, gone=gone, note=note)


def found(*trials: Trial, deviations: tuple[Deviation, ...] = (), operations: int = 0, tap: Tap | None = None) -> Found:
    return Found(base=BASE, trials=trials, deviations=deviations, operations=operations, tap=tap)


def deviation(group: str, layer: int) -> Deviation:
    return Deviation(op="linear", group=group, key=f"layers.{layer}.o", layer=layer, error=0.5, allowed=1e-5)


def test_the_first_that_takes_the_difference_away_carries_it() -> None:
    said = conclude(
        found(
            trial("graphs", 1e-3),
            trial("chunked prefill", 1e-10, gone=True),
            trial("linears", 1e-11, gone=True),
            deviations=(deviation("norms", 0), deviation("linears", 2)),
            operations=40,
        ),
        "float32",
    )
    assert said.feature == "chunked prefill"
    assert said.layer == 2, "of groups that carry it, the first call beyond the band"
    assert said.statements[0] == (
        "The difference is carried by chunked prefill: where chunked prefill is off, mean KL falls from 0.001 to "
        "1e-10, which is within noise."
    )
    assert said.statements[1] == "It also goes where linears come by their references."
    assert (
        "Of 40 operations 2 left the band of float32. Where it begins: linear over layers.2.o in layer 2"
        in (said.statements[2])
    )


@pytest.mark.parametrize(
    ("trials", "feature", "said"),
    [
        ((trial("graphs", 9e-5), trial("overlap", 1e-3)), "graphs", "Most of the difference is carried by graphs"),
        ((trial("graphs", 9e-4),), "", "No feature that can be turned off carries the difference."),
        ((trial("graphs", 0.0, note="no memory"),), "", "No feature that can be turned off"),
        ((trial("all of these", 0.0, gone=True),), "", "it is gone where all are off together"),
        ((trial("all of these", 1e-3), trial("all operations", 0.0, gone=True)), "", "where all are references"),
        ((trial("all operations", 1e-3),), "", "Nothing that runs here carries the difference"),
    ],
)
def test_what_is_said_where_nothing_carries_it_alone(trials: tuple[Trial, ...], feature: str, said: str) -> None:
    conclusion = conclude(found(*trials), "float32")
    assert conclusion.feature == feature
    assert said in conclusion.statements[0]
    assert conclusion.layer is None


def test_where_records_part_is_said_where_operations_are_right() -> None:
    tap = Tap(name="layers.3.mlp_norm", layer=3, error=0.1, floor=1e-6)
    said = conclude(found(trial("all operations", 1e-3), operations=7, tap=tap), "bfloat16")
    assert said.layer == 3
    assert said.statements[1] == "Each of 7 operations is as near to its float64 reference as bfloat16 rounds."
    assert said.statements[2].startswith("Against the record, layers.3.mlp_norm is the first result beyond noise")


def test_layers_are_read_from_names() -> None:
    assert [layer_of(key) for key in ("layers.12.o", "norm", "head", "layers.x")] == [12, None, None, None]


def test_errors_show_one_wrong_feature_and_no_rounded_outlier() -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal((20, 64))
    want[:, 5] *= 300.0
    assert error(want, want) == 0
    assert error(want * (1 + 1e-6), want) == pytest.approx(1e-6, rel=1e-3)
    wrong = want.copy()
    wrong[:, 9] *= 1.5
    plain = rng.standard_normal((20, 64))
    mistaken = plain.copy()
    mistaken[:, 9] *= 1.5
    assert error(mistaken, plain) > 0.3
    assert error(np.full_like(plain, np.nan), plain) == MOST
    assert error(plain + 1.0, plain, np.full_like(plain, 100.0)) < 0.02, "terms that cancelled"


def test_attention_out_of_order_is_refused() -> None:
    class NoModel:
        def parameters(self) -> tuple[()]:
            return ()

        def rope_tables(self, context_length: int) -> tuple[()]:
            return ()

    ops, layer = ReferenceOps(), LayerKV(index=0, q_heads=1, kv_heads=1, k_dim=4, v_dim=4, scale=0.5)
    references = References(NoModel(), None, 8)  # type: ignore[arg-type]
    x = np.ones((2, 1, 4))
    call = Call("attend", "layers.0.qkv", ops, (x, x, x, layer, None, np.array([3, 4])), x)
    with pytest.raises(CardanError, match=r"position 3 came after 0 tokens\. Run it without other requests"):
        references.result(call)


def test_quantized_weights_come_widened(tmp_path: Path) -> None:
    """The feature is offered where there are such weights, and their values are those that they mean."""
    name = "gptq4-32-sym"
    values = quantized_checkpoints.write(tmp_path, quantized_checkpoints.METHODS[name])
    with Session(tiny_config(tmp_path, "cpu")) as session:
        offered = {switch.feature for switch in switches(session, tiny_cases())}
        checkpoint = session.prepared.opened.checkpoint
        widened = WidenedCheckpoint(checkpoint)
        tensor = "model.layers.0.mlp.up_proj.weight"
        assert checkpoint.tensor(tensor).dtype != "F32"
        view = widened.tensor(tensor)
        assert view.dtype == "F32"
        assert np.allclose(widened.dequantize(view), values[tensor], atol=1e-6)
        assert widened.tensor("model.norm.weight").dtype == "F32"
        assert set(widened.names()) == set(checkpoint.names())
        assert widened.num_bytes(tensor) == checkpoint.num_bytes(tensor)
        assert widened.config == checkpoint.config
    assert {"quantized linears", "prefix cache", "chunked prefill", "batching"} <= offered


def test_narrow_types_are_features(tiny_llama: Path) -> None:
    with Session(tiny_config(tiny_llama, "cpu", "bfloat16")) as session:
        offered = {switch.feature for switch in switches(session, tiny_cases())}
    assert {"keys and values in bfloat16", "activations in bfloat16"} <= offered
    assert "quantized linears" not in offered


@pytest.fixture
def compared(recorded) -> Comparison:
    attribution = conclude(
        found(
            trial("graphs", 1e-10, gone=True),
            trial("<b>overlap</b>", 0.0, note="could not be tried: too little memory"),
            deviations=(deviation("linears", 2),),
            operations=3,
        ),
        "float32",
    )
    return replace(compare(recorded(), recorded()), attribution=attribution)


def test_reports_hold_the_attribution(compared: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    from cardan.cli.comparison_text import show_comparison
    from cardan.cli.terminal import results

    page = render(compared)
    for wanted in ("What carries the difference", "graphs is off", "within noise", "too little memory", "layers.2.o"):
        assert wanted in page, wanted
    assert "<b>overlap" not in page
    assert json.loads(json.dumps(compared.to_json(), allow_nan=False))["attribution"]["feature"] == "graphs"
    show_comparison(results(), compared)
    shown = " ".join(capsys.readouterr().out.split())
    assert "attribution: The difference is carried by graphs" in shown
    assert "could not be tried: too little memory" in shown


def test_two_records_cannot_be_attributed(recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(noise=False).write(tmp_path / "g")
    arguments: list[Any] = ["accuracy", "compare", str(tmp_path / "g"), str(tmp_path / "g"), "--attribute"]
    assert app.run(arguments) == 2
    assert "so --attribute has no effect" in " ".join(capsys.readouterr().err.split())
