"""Loss curves by method and by part: measured as far as they are missing, and kept in one file."""

import json
import logging
from pathlib import Path

import pytest

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.pipeline.loss_curves import curves_for
from trisect.plan import Curves, read_curves

CALIBRATION = tokens_from_tensor(tokens(16, 30, seed=5))


def measured(path: Path | None, *, model: object = None, calibration=CALIBRATION, **settings: object) -> Curves:
    config = CompressConfig(**{"ratio": 0.3, "allocate": "balanced", "align": 8, **settings})  # type: ignore[arg-type]
    curves = curves_for(model or tiny("llama-gqa"), config, calibration, path=path, progress=None)
    assert curves is not None
    return curves


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "qwen3"])
def test_the_papers_method_has_curves_of_its_own(name: str) -> None:
    model = tiny(name)
    papers = measured(None, model=model, method="a3", parts=("mlp",))
    repaired = measured(None, model=model, method="a3+", parts=("mlp",))
    assert (papers.method, repaired.method) == ("a3", "a3+")
    assert papers.dense_loss == repaired.dense_loss
    assert papers.points.keys() == repaired.points.keys()
    assert papers.points != repaired.points


def test_methods_without_curves_go_by_those_of_a3_plus() -> None:
    assert measured(None, method="a3-xkv", parts=("ov",)).method == "a3+"


def test_every_component_is_measured_at_four_widths_of_the_grid() -> None:
    curves = measured(None, method="a3", parts=("qk", "mlp"))
    assert sorted(curves.points[0, "mlp"]) == [20, 40, 60, 72, 80]
    assert sorted(curves.points[0, "qk"]) == [4, 8, 12, 14, 16]


def test_parts_that_a_file_lacks_are_measured_and_added(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    heads = measured(path, method="a3", kv_ratio=0.2, ratio=None)
    assert {part for _, part in heads.points} == {"qk", "ov"}
    everything = measured(path, method="a3")
    assert {part for _, part in everything.points} == {"qk", "ov", "mlp"}
    assert everything.points.items() >= heads.points.items()
    assert read_curves(path) == everything
    with pytest.raises(TrisectError, match="tokens, not on moments"):
        measured(tmp_path / "none.json", calibration=None)


def test_a_file_of_other_tokens_is_used_but_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    heads = measured(path, method="a3", parts=("ov",))
    other = tokens_from_tensor(tokens(16, 30, seed=6))
    assert measured(path, method="a3", parts=("ov",), calibration=other) == heads
    with pytest.raises(TrisectError, match=r"no curves of mlp and was measured on other calibration tokens"):
        measured(path, method="a3", parts=("mlp",), calibration=other)


def test_a_file_without_a_method_is_a3_plus_and_a_mismatch_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "curves.json"
    measured(path, method="a3", parts=("ov",))
    data = json.loads(path.read_text())
    del data["method"], data["dense_loss"]
    path.write_text(json.dumps(data))
    assert read_curves(path).method == "a3+"
    assert read_curves(path).dense_loss is None
    monkeypatch.setattr(logging.getLogger("trisect"), "propagate", True)
    measured(path, method="a3", parts=("ov",))
    assert "measured with a3+, the plan is for a3" in caplog.text
