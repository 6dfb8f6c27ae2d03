"""JSON and YAML from strangers: what is good is read as the libraries read it, what is not is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz_damage import BOMB
from hypothesis import given, settings
from hypothesis import strategies as st

from trisect.config.settings import parse_layers, read_mapping
from trisect.errors import TrisectError
from trisect.support.checks import LARGEST_YAML, parse_json, parse_yaml, read_json, shown

REPOSITORY = Path(__file__).resolve().parents[2]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz ", max_size=6), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(PLAIN)
def test_plain_data_is_read_as_it_was_written(data: Any) -> None:
    assert parse_json(json.dumps(data), where="x") == data
    assert parse_yaml(yaml.safe_dump(data), where="x") == data


@pytest.mark.parametrize("path", sorted((REPOSITORY / "experiments/recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_are_read_as_yaml_reads_them(path: Path) -> None:
    assert parse_yaml(path.read_text(), where="x") == yaml.safe_load(path.read_text())


def test_aliases_and_merges_work() -> None:
    text = "base: &base {samples: 4, length: 8}\none: {<<: *base, length: 16}\ntwo: [*base, *base]\n"
    assert parse_yaml(text, where="x") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' comes twice"),
        ('{"a": NaN}', "too large or no number"),
        ('{"a": -Infinity}', "too large or no number"),
        ('{"a": 1e999}', "too large or no number"),
        ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"a": 9223372036854775808}', "64 bits"),
        ("[" * 65 + "1" + "]" * 65, "nested more than 64"),
        ("[" * 200_000, "nested more than 64"),
        ('{"a": "\\ud800"}', "half a letter"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ('{"a": 1} x', "is not JSON"),
    ],
)
def test_json_that_means_trouble_is_refused(text: str, message: str) -> None:
    with pytest.raises(TrisectError, match=message) as caught:
        parse_json(text, where="x.json")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "write out to over"),
        ("&a [*a]", "holds itself"),
        ("x: &a {y: *a}", "holds itself"),
        ("a: 1\na: 2", "'a' comes twice"),
        ("a: 2001-99-99", "not valid YAML"),
        ("a: 2001-01-01", "read as a date"),
        ("a: !!timestamp x", "not valid YAML"),
        ("a: !!bool x", "not valid YAML"),
        ("a: !!int ''", "not valid YAML"),
        ("!!set {a, b}", "read as a set"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: 1" + ":1" * 500, "digits"),
        ("a: 0x" + "f" * 9000, "digits"),
        ("a: 0x" + "f" * 20, "64 bits"),
        ("a: .nan", "NaN"),
        ("1: x", "must be text"),
        ("[" * 200 + "]" * 200, "nested more than 64"),
        ("[" * 70 + "]" * 70, "nested more than 64"),
        ("a: [", "not valid YAML"),
        ("\x07", "not valid YAML"),
    ],
)
def test_yaml_that_means_trouble_is_refused(text: str, message: str) -> None:
    with pytest.raises(TrisectError, match=message) as caught:
        parse_yaml(text, where="x.yaml")
    assert len(str(caught.value)) < 600


def test_a_bomb_in_a_run_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BOMB)
    with pytest.raises(TrisectError, match=r"run\.yaml"):
        read_mapping(tmp_path / "run.yaml")


def test_files_that_are_too_large_or_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("#" * (LARGEST_YAML + 1))
    with pytest.raises(TrisectError, match="more than"):
        read_mapping(tmp_path / "run.yaml")
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), tmp_path / "a\0b"):
        with pytest.raises(TrisectError, match="no such file"):
            read_json(path)


@settings(max_examples=40)
@given(PLAIN | st.binary(max_size=5000) | st.text(max_size=5000))
def test_shown_values_are_short(value: Any) -> None:
    assert len(shown([value] * 1000)) < 2000
    assert shown(3) == "3"
    assert shown(math.inf) == "inf"


def test_ranges_of_layers_do_not_fill_the_memory() -> None:
    for text in ("0-99999999", "0-99999999999999", "9" * 5000):
        with pytest.raises(TrisectError, match="layer"):
            parse_layers(text)
