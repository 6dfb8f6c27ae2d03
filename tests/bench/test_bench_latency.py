"""Latency tables: what is measured adds up to a layer, is kept, and plans under a budget end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bench_help import flop_laps, subject
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny_models import LLAMA
from trisect.bench.latency import Workload, grid_points, layer_seconds, measure_latency
from trisect.cli import main
from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.plan import LatencyTable, apply_plan, plan_for, read_latency
from trisect.plan.budget import layer_flops
from trisect.records.shapes import ModelShape
from trisect.support.files import write_json

LOAD = Workload(phase="prefill", batch=2, length=24)


def wide(family: str = "llama-gqa") -> ModelShape:
    """Wide enough for a few points on the grid."""
    layers = {"num_hidden_layers": 2} if family == "llama-gqa" else {}
    shape = subject(family, **layers).dense_shape(torch.float32)
    wider = (replace(layer, qk=48, vo=48, pairs=24 if layer.pairs else 0, mlp=300) for layer in shape.layers)
    return replace(shape, layers=tuple(wider))


def table_of(shape: ModelShape, load: Workload = LOAD, lap: Any = flop_laps, **settings: Any) -> LatencyTable:
    with sdpa_kernel(SDPBackend.MATH):  # whose products the profiler counts
        return measure_latency(shape, load, device="cpu", dtype=torch.float32, lap=lap, repeats=1, **settings)


@pytest.mark.parametrize("family", ["llama-gqa", "gpt2"])
@pytest.mark.parametrize("load", [LOAD, Workload(phase="decode", batch=3, length=40)], ids=lambda load: load.phase)
def test_the_times_of_the_components_add_up_to_the_layer(family: str, load: Workload) -> None:
    """With a clock that counts FLOPs: what the layer's matrix products do."""
    shape = wide(family)
    table = table_of(shape, load)
    for width, mlp in ((48, 300), (32, 256), (16, 128)):
        layer = replace(shape.layers[0], qk=width, vo=width, pairs=min(shape.layers[0].pairs, width // 2), mlp=mlp)
        flops = layer_flops(layer, batch=load.batch, tokens=load.tokens, context=load.length)
        assert layer_seconds(table, layer) == pytest.approx(flops.projections + flops.scores + flops.mlp, rel=1e-6)


def test_every_width_of_the_grid_is_measured_once_for_layers_alike() -> None:
    points = [(component, width) for _, component, width in grid_points(wide(), align=16)]
    heads = [16, 32, 48]
    assert points == [
        *(("qk", width) for width in heads),
        *(("ov", width) for width in heads),
        *(("mlp", width) for width in (128, 256, 300)),
        ("rest", 0),
    ]
    assert {width for _, part, width in grid_points(wide(), align=8) if part == "qk"} == set(range(8, 49, 8))


def test_what_was_measured_is_saved_at_once_and_not_measured_again(tmp_path: Path) -> None:
    shape, saved = wide(), []
    whole = table_of(shape, save=saved.append)
    assert [sum(map(len, table.seconds.values())) for table in saved] == list(range(1, 11))
    (tmp_path / "t.json").write_text(json.dumps(saved[4].to_dict()))
    counted: list[int] = []

    def counting(work: Any, count: int) -> list[float]:
        counted.append(count)
        return flop_laps(work, count)

    known = read_latency(tmp_path / "t.json")
    assert (known.device, known.dtype, known.workload) == (whole.device, "float32", LOAD.__dict__)
    again = table_of(shape, lap=counting, known=known)
    assert again.seconds == whole.seconds
    assert len(counted) < 2 * (6 * 2 + 4)
    untouched: list[int] = []
    table_of(shape, known=again, save=lambda table: untouched.append(1))
    assert not untouched


@pytest.mark.parametrize(
    "change", [{"workload": {"phase": "decode", "batch": 2, "length": 24}}, {"dtype": "bfloat16"}, {"device": "H200"}]
)
def test_a_table_of_another_device_dtype_or_workload_is_not_added_to(change: dict[str, Any]) -> None:
    known = replace(table_of(wide()), **change)
    with pytest.raises(TrisectError, match=f"was measured with {next(iter(change))} .*name another file"):
        table_of(wide(), known=known)


def test_norms_and_residuals_are_in_the_table_but_in_no_component() -> None:
    shape = wide()
    table = table_of(shape, lap=lambda work, count: [1.0] * count)
    layer = shape.layers[0]
    assert table.rest(layer) == 10**9
    # GEMMs of three components, half an attention for two of them, and the rest.
    assert layer_seconds(table, layer) == 1.5 + 1.5 + 1.0 + 1.0
    old = LatencyTable(seconds={k: v for k, v in table.seconds.items() if k[0] != "rest"}, device="", dtype="")
    assert old.rest(layer) == 0


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 48, "intermediate_size": 384, "num_hidden_layers": 2})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def make_proportional(path: Path) -> None:
    """The same table with times that grow with the width, whatever was measured."""
    times = read_latency(path)
    seconds = {key: {w: 1e-6 * (w + 1) for w in points} for key, points in times.seconds.items()}
    write_json(path, replace(times, seconds=seconds).to_dict())


def test_a_measured_table_plans_under_a_latency_budget(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, plan = tmp_path / "latency.json", tmp_path / "plan.json"
    bench = ["bench", str(model_folder), "--latency-table", str(table), "--length", "16", "--repeats", "2", "-q"]
    assert main(bench) == 0
    shown = capsys.readouterr()
    assert f"{table}: {sum(map(len, read_latency(table).seconds.values()))} times of" in shown.out
    assert "Next: " not in shown.out  # --quiet
    assert not shown.err
    before = table.read_bytes()
    assert main(bench) == 0  # everything is there
    assert table.read_bytes() == before
    make_proportional(table)  # what this machine measured today may leave nothing to plan
    wanted = ["plan", str(model_folder), "--ratio", "0.2", "--budget", "latency", "--latency-table", str(table)]
    assert main([*wanted, "--allocate", "uniform", "--json", str(plan)]) == 0
    budget = json.loads(plan.read_text())["budget"]
    assert budget["unit"] == "latency"
    assert budget["allowed"] <= budget["planned"] < budget["before"]
    # The same from Python, and the sum of the table's own entries.
    times, shape = read_latency(table), subject_shape(model_folder)
    config = CompressConfig(ratio=0.2, budget="latency", latency_table=str(table), allocate="uniform")
    planned = apply_plan(shape, plan_for(shape, config))
    total = sum(
        times.nanoseconds(layer, part, layer.width(part)) for layer in planned.layers for part in ("qk", "ov", "mlp")
    )
    assert total + sum(map(times.rest, planned.layers)) == budget["planned"]


def subject_shape(folder: Path) -> ModelShape:
    from trisect.models import read_shape

    return read_shape(str(folder))[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1,2"], "one batch and one length"),
        (["--length", "8,16"], "one batch and one length"),
        (["--phase", "warp"], "Unknown phase"),
    ],
)
def test_a_table_of_several_workloads_is_refused(
    options: list[str], message: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "latency.json"
    assert main(["bench", str(model_folder), "--latency-table", str(table), *options]) == 2
    assert message in capsys.readouterr().err
    assert not table.exists()
