"""Alpaca-style data: read, refused by record number, and masked so that only responses are learned."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning import characters

from trisect.errors import TrisectError
from trisect.finetune.examples import (
    IGNORED,
    Example,
    Instruction,
    collate,
    holds_instructions,
    instruction_examples,
    load_examples,
    read_instructions,
)

GOOD = {"instruction": "Say hello.", "input": "", "output": "Hello!"}
TAIL = "### Response:\n"
TEXT = st.text("abc xyz.\n", min_size=1, max_size=12)


def write(path: Path, records: Any) -> Path:
    lines = path.suffix == ".jsonl"
    path.write_text("\n\n".join(map(json.dumps, records)) if lines else json.dumps(records, indent=1))
    return path


def spelt(tokenizer: Any, ids: Any) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(map(int, ids))))


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_a_list_and_lines_hold_the_same_records(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [GOOD, {"instruction": "Add.", "output": "3", "id": 7}])
    assert holds_instructions(path)
    assert read_instructions(path) == [Instruction(**GOOD), Instruction(instruction="Add.", input="", output="3")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"instruction": "Add."}, "record 2: output is missing; the form is {"),
        ({"input": "", "output": "3"}, "record 2: instruction is missing"),
        ({**GOOD, "output": None}, "record 2: output must be a valid string, not None"),
        ({**GOOD, "input": 3}, "record 2: input must be a valid string, not 3"),
        (["Add.", "3"], "record 2: it must be a valid mapping, not ['Add.', '3']"),
    ],
)
@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_a_bad_record_is_named_by_its_number(record: Any, said: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [GOOD, record, GOOD])
    with pytest.raises(TrisectError) as error:
        read_instructions(path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("data.json", "[", "not JSON"),
        ("data.json", "[]", "holds no records"),
        ("data.jsonl", '{"instruction": "a"', "line 1: not JSON"),
    ],
)
def test_files_that_are_no_data(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TrisectError) as error:
        read_instructions(tmp_path / name)
    assert said in str(error.value)


def test_records_with_text_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"text": "abcdefgh" * 3}, {"text": "xyz"}])
    assert not holds_instructions(path)
    found = load_examples(str(path), characters(), length=5, loss="response")
    assert found.kind == "text"
    assert all(len(item.ids) == 5 and item.first == 1 for item in found.items)


@pytest.mark.parametrize("start", [False, True])
@settings(max_examples=25)
@given(instruction=TEXT, given_input=st.one_of(st.just(""), TEXT), output=TEXT)
def test_exactly_the_response_and_the_end_are_learned(
    start: bool, instruction: str, given_input: str, output: str
) -> None:
    """One token per character: the oracle is the text itself."""
    tokenizer = characters(start=start)
    record = Instruction(instruction=instruction, input=given_input, output=output)
    found = instruction_examples([record], tokenizer, source="s", length=10_000, loss="response")
    (example,) = found.items
    batch = collate([example, Example((1,) * (len(example.ids) + 3), 1)])
    kept = batch["labels"][0] != IGNORED
    assert spelt(tokenizer, batch["input_ids"][0][kept]) == output + "</s>"
    assert (batch["labels"][0][kept] == batch["input_ids"][0][kept]).all()
    before = spelt(tokenizer, example.ids[: example.first])
    assert before.endswith(TAIL)
    assert before.startswith("<s>Below" if start else "Below")
    assert (instruction in before, given_input in before) == (True, True)
    assert batch["attention_mask"][0].sum() == len(example.ids)


def test_a_token_across_the_border_is_learned() -> None:
    """The prompt ends with a line break and the response starts with one, and both are one token."""
    words = ["<unk>", "\n", "\n\n", *"abcdefghijklmnopqrstuvwxyzBIRW#:.,- "]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({w: i for i, w in enumerate(words)}, [("\n", "\n")], unk_token="<unk>")
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    record = Instruction(instruction="a", input="", output="\nbc")
    (example,) = instruction_examples([record], tokenizer, source="s", length=999, loss="response").items
    assert [words[i] for i in example.ids[example.first :]] == ["\n\n", "b", "c"]


def test_all_learns_everything_but_the_first_token() -> None:
    (example,) = instruction_examples([Instruction(**GOOD)], characters(), source="s", length=999, loss="all").items
    assert example.first == 1


def test_long_examples_lose_their_end_and_hopeless_ones_are_left_out() -> None:
    records = [
        Instruction(**GOOD),
        Instruction(**{**GOOD, "instruction": "x" * 300}),
        Instruction(**{**GOOD, "output": ""}),
    ]
    whole = instruction_examples(records, characters(), source="s", length=999, loss="response")
    assert (len(whole.items), whole.cut, whole.left_out) == (2, 0, 1)
    length = whole.items[0].first + 2
    found = instruction_examples(records, characters(), source="s", length=length, loss="response")
    assert (found.cut, found.left_out, found.learned) == (1, 2, 2)
    with pytest.raises(TrisectError, match="No response of s begins within --length 9"):
        instruction_examples(records, characters(), source="s", length=9, loss="response")


def test_the_hash_follows_content_and_mask() -> None:
    def made(**changes: str) -> str:
        record = Instruction(**{**GOOD, **changes})
        loss = "all" if changes.get("input") == "all" else "response"
        return instruction_examples([record], characters(), source="s", length=999, loss=loss).hash

    assert made() == made()
    assert len({made(), made(output="Hallo!"), made(input="x"), made(input="all")}) == 4
    plain = instruction_examples([Instruction(**GOOD)], characters(), source="s", length=999, loss="all")
    assert plain.hash != made()
