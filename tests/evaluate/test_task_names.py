"""Which tasks a text asks for, and how bad requests are answered."""

import re

import pytest

from trisect.errors import TrisectError
from trisect.evaluate.tasks import FOLDERS, PRESETS, _possible_names, parse_tasks


def asked(text: str, shots: int | None = None) -> dict[str, int | None]:
    return {request.name: request.shots for request in parse_tasks(text, shots=shots)}


def test_the_paper_preset_is_the_papers_setting() -> None:
    expected = {"arc_challenge": 25, "boolq": 0, "openbookqa": 0, "winogrande": 5, "gsm8k": 5, "mmlu": 5}
    assert asked("paper") == expected


def test_a_task_by_its_name_has_lm_evals_shots() -> None:
    assert asked("mmlu, winogrande ,arc_easy") == {"mmlu": None, "winogrande": None, "arc_easy": None}
    assert asked("arc_challenge:0,boolq:2") == {"arc_challenge": 0, "boolq": 2}
    expected = {"winogrande": 0, "openbookqa": 0, "lambada_openai": 0, "gsm8k": None}
    assert asked("quick,winogrande:0,gsm8k") == expected


def test_shots_replace_those_that_the_text_does_not_state() -> None:
    assert asked("boolq,mmlu:5,arc_challenge", shots=1) == {"boolq": 1, "mmlu": 5, "arc_challenge": 1}
    assert set(asked("paper", shots=3).values()) == {3}


def test_every_preset_can_be_parsed() -> None:
    for name, members in PRESETS.items():
        assert len(asked(name)) == len(members)
        assert set(asked(name)) <= set(FOLDERS)


@pytest.mark.slow
def test_every_name_that_lm_eval_knows_is_accepted_and_the_short_cuts_are_right() -> None:
    manager = pytest.importorskip("lm_eval.tasks").TaskManager()
    assert not [name for name in manager.all_tasks if name not in _possible_names()]
    for name, folder in FOLDERS.items():
        assert manager.task_index[name].yaml_path.parent.as_posix().endswith(f"lm_eval/tasks/{folder}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arc_chalenge", "Unknown task 'arc_chalenge'. Did you mean arc_challenge?"),
        ("papers", "Did you mean paper?"),
        ("boolq,hella", "Did you mean hellaswag?"),
        ("paper:5", "Presets: paper, zero-shot, quick."),
        (" , ", "No task in"),
        ("boolq:five", "such as boolq:5"),
        ("boolq:-1", "such as boolq:5"),
        ("boolq:", "such as boolq:5"),
        ("zero-shot,arc_challenge:25", "arc_challenge with 0 and with 25 examples"),
    ],
)
def test_bad_texts_say_what_would_do(text: str, message: str) -> None:
    with pytest.raises(TrisectError, match=re.escape(message)):
        parse_tasks(text)


def test_negative_shots_are_refused() -> None:
    with pytest.raises(TrisectError, match="--shots 0 or more"):
        parse_tasks("paper", shots=-1)
