"""ASVD's sensitivities are measured once and serve every ratio; a file of anything else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.pipeline import rank_search as ranks
from trisect.plan import Plan

CALIBRATION = tokens_from_tensor(tokens(6, 20, seed=5))


def planned(path: Path | None, ratio: float = 0.2, **settings: Any) -> Plan:
    model, calibration = settings.pop("model", None) or tiny("gpt2"), settings.pop("text", CALIBRATION)
    config = CompressConfig(method="asvd", ratio=ratio, align=None, allocate="search", **settings)
    return ranks.linear_plan(model, config, calibration, path=path)


def test_another_ratio_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sensitivities.json"
    fresh = {ratio: planned(None, ratio) for ratio in (0.2, 0.4)}
    assert planned(path, 0.2) == fresh[0.2]
    written = path.read_bytes()
    monkeypatch.setattr(ranks, "_sensitivities", lambda problem: pytest.fail("measured again"))
    assert planned(path, 0.4) == fresh[0.4] != fresh[0.2]
    assert planned(path, 0.2, parts=("mlp",)).linears != fresh[0.2].linears
    assert path.read_bytes() == written


def test_sensitivities_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sensitivities.json"
    planned(path, parts=("mlp",))
    with pytest.raises(TrisectError, match="another token hash.*name a new file"):
        planned(path, parts=("mlp",), text=tokens_from_tensor(tokens(6, 20, seed=6)))
    with pytest.raises(TrisectError, match="another fingerprint"):
        planned(path, parts=("mlp",), model=tiny("opt"))
    with pytest.raises(TrisectError, match="no sensitivities of q in layer 0"):
        planned(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [],
        lambda data: {**data, "sensitivities": 3},
        lambda data: {**data, "sensitivities": [3]},
        lambda data: {**data, "sensitivities": [{**data["sensitivities"][0], "share": 2}]},
        lambda data: {**data, "sensitivities": [{**data["sensitivities"][0], "layer": "0"}]},
        lambda data: {**data, "sensitivities": [{**data["sensitivities"][0], "perplexity": None}]},
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "sensitivities.json"
    planned(path, parts=("mlp",))
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(TrisectError, match=r"sensitivities\.json"):
        planned(path, parts=("mlp",))
