"""The picture of a plan says what the plan says, and the same plan gives the same bytes."""

from dataclasses import replace

import pytest
from plan_shapes import layer_shape, model_shape
from rich.console import Console

from trisect.records.shapes import LinearShape
from trisect.report.charts import plan_map
from trisect.report.terminal import heat_tables, kept_shares
from trisect.support.plots import svg

LAYER = layer_shape(qk=64, pairs=32, vo=64, mlp=1536)
BEFORE = model_shape(*[LAYER] * 30)
AFTER = model_shape(*[replace(LAYER, qk=48, pairs=24, vo=64, mlp=1152 - 64 * (n % 3)) for n in range(30)])


def test_shares_are_those_of_the_widths():
    shares = kept_shares(BEFORE, AFTER)
    assert shares["qk"] == [0.75] * 30
    assert shares["ov"] == [1.0] * 30
    assert shares["mlp"][:3] == [0.75, 1088 / 1536, 1024 / 1536]


def test_shares_of_factored_maps_are_those_of_their_parameters():
    factored = replace(LAYER, linears=(LinearShape(name="up", rank=100), LinearShape(name="down", rank=200)))
    shares = kept_shares(model_shape(LAYER, LAYER), model_shape(LAYER, factored))
    matrix, pair = LAYER.d_model * LAYER.mlp, LAYER.d_model + LAYER.mlp
    gates = 1 if LAYER.gated else 0
    assert shares["mlp"] == [1.0, (gates * matrix + 300 * pair) / ((gates + 2) * matrix)]
    assert shares["qk"] == shares["ov"] == [1.0, 1.0]


def test_the_terminal_shows_every_layer_and_fits_its_line(capsys: pytest.CaptureFixture[str]):
    console = Console(width=120)
    for table in heat_tables(BEFORE, AFTER):
        console.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0].split()[2:] == [str(n) for n in range(24)]
    assert lines[1].split() == ["QK", *["75"] * 24]
    assert lines[3].split()[:4] == ["MLP", "75", "71", "67"]
    assert lines[4].split()[2:] == [str(n) for n in range(24, 30)]


def test_the_same_plan_gives_the_same_bytes():
    pytest.importorskip("matplotlib")
    before, after = (model_shape(*shape.layers[:6]) for shape in (BEFORE, AFTER))
    first, again = (svg(plan_map(before, after, title="a plan")) for _ in range(2))
    assert first == again != svg(plan_map(before, before, title="a plan"))


def test_an_svg_has_no_date_and_the_numbers_as_text():
    pytest.importorskip("matplotlib")
    text = svg(plan_map(BEFORE, AFTER, title="tiny: a3"))
    assert "<dc:date>" not in text
    assert "tiny: a3" in text
    assert ">71</text>" in text
