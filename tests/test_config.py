"""A configuration is checked once, and says what is wrong with it."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trisect.config.settings import (
    CalibrationConfig,
    CompressConfig,
    parse_align,
    parse_layers,
    parse_parts,
    read_mapping,
)
from trisect.errors import TrisectError

CONFIGS = st.builds(
    lambda **settings: CompressConfig(**settings),
    ratio=st.floats(0.01, 0.99),
    method=st.sampled_from(["a3", "a3+"]),
    parts=st.lists(st.sampled_from(["qk", "ov", "mlp"]), min_size=1, unique=True).map(tuple),
    layers=st.none() | st.lists(st.integers(0, 80), min_size=1).map(tuple),
    align=st.sampled_from([8, 16, 32, None]),
    rope_scope=st.sampled_from(["head", "layer", "model"]),
    without=st.lists(st.sampled_from(["fold", "values"]), unique=True).map(tuple),
    calibration=st.builds(
        CalibrationConfig,
        samples=st.integers(1, 512),
        length=st.integers(2, 8192),
        sampling=st.sampled_from(["random", "first"]),
    ),
)


@given(config=CONFIGS)
def test_a_config_comes_back_from_json_and_yaml_as_it_was(config):
    data = config.to_dict()
    assert CompressConfig.from_dict(json.loads(json.dumps(data))) == config
    assert CompressConfig.from_dict(yaml.safe_load(yaml.safe_dump(data))) == config


@pytest.mark.parametrize("ratio", [0.25, "0.25", "25%", " 25 % ", ".25", "2.5e-1", "25.%"])
def test_a_share_is_read_as_people_write_it(ratio):
    assert CompressConfig(ratio=ratio).ratio == 0.25


@pytest.mark.parametrize(
    "ratio", [0, 1, -0.1, 1.5, 25, float("nan"), "25", "-0.1", "101%", "25 %%", "1e9999", "", True, None]
)
def test_a_ratio_outside_zero_and_one_is_refused(ratio):
    with pytest.raises(TrisectError, match="ratio"):
        CompressConfig(ratio=ratio)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ()}, "No parts"),
        ({"parts": ("qk", "qk")}, "twice"),
        ({"parts": ("vo",)}, "Unknown part 'vo'"),
        ({"layers": ()}, "No layers"),
        ({"layers": (-1,)}, "layers must"),
        ({"align": 12}, "Cannot align"),
        ({"qk_norm_tolerance": -1}, "qk_norm_tolerance"),
        ({"rope_scope": "heads"}, "Did you mean head"),
        ({"without": 5}, "list of names"),
        ({"without": (1,)}, "list of names"),
        ({"seed": -1}, "seed"),
        ({"method": ""}, "method"),
        ({"calibration": {"samples": 0}}, "samples"),
        ({"calibration": {"length": 1}}, "length"),
        ({"calibration": {"sampling": "frist"}}, "Did you mean first?"),
        ({"calibration": {"batch_size": 0}}, "batch_size"),
        ({"calibration": {"source": ""}}, "source"),
        ({"calibration": 5}, "source"),
        ({"calibration": []}, "source"),
        ({"calibration": {"source": ["a", 1]}}, "source"),
    ],
)
def test_a_bad_value_is_refused_by_name(change, message):
    with pytest.raises(TrisectError, match=message):
        CompressConfig.from_dict({"ratio": 0.25, **change})


def test_an_unknown_key_is_named_with_near_ones():
    with pytest.raises(TrisectError, match="'layer'. Did you mean layers?"):
        CompressConfig.from_dict({"ratio": 0.25, "layer": [1]})
    with pytest.raises(TrisectError, match="CalibrationConfig setting 'sample'. Did you mean samples"):
        CompressConfig.from_dict({"ratio": 0.25, "calibration": {"sample": 1}})


def test_no_ratio_is_an_error_that_shows_one():
    with pytest.raises(TrisectError, match=r"--ratio 0\.25"):
        CompressConfig.from_dict({})


def test_a_file_may_use_the_command_lines_spellings(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("ratio: 0.3\nparts: mlp,qk\nlayers: 1-3\nalign: none\n")
    config = CompressConfig.from_dict(read_mapping(path))
    assert config.parts == ("qk", "mlp")
    assert config.layers == (1, 2, 3)
    assert config.align is None


@pytest.mark.parametrize("text", ["ratio: [", "- 1\n", "0", "\x00"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(TrisectError, match=r"run\.yaml"):
        read_mapping(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(TrisectError, match="Cannot read"):
        read_mapping(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "layers"),
    [("4-6", (4, 5, 6)), ("0,3,5-7", (0, 3, 5, 6, 7)), ("2", (2,)), ("3,1,1-2", (1, 2, 3)), ("all", None)],
)
def test_layers_are_read(text, layers):
    assert parse_layers(text, 8) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1..3", "3-1", "1,,2", "8", "0-8"])
def test_bad_layers_are_refused(text):
    with pytest.raises(TrisectError):
        parse_layers(text, 8)


def test_align_and_parts_are_read():
    assert [parse_align(text) for text in ("8", "16", "32", "none")] == [8, 16, 32, None]
    assert parse_parts("mlp, qk") == ("qk", "mlp")
    with pytest.raises(TrisectError, match="--align"):
        parse_align("7")
    with pytest.raises(TrisectError, match="Unknown part 'kq'"):
        parse_parts("kq")
