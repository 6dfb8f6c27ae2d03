"""load_tokens over names, files, mixtures and tensors."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from trisect.data import list_sources, load_tokens
from trisect.data.catalogue import builtin_documents, paragraphs
from trisect.errors import TrisectError


def test_no_paragraph_of_the_builtin_text_is_in_both_splits():
    parts = {
        split: {key for text in builtin_documents(split=split) for key, _ in paragraphs(text)}
        for split in ("calibration", "evaluation")
    }
    assert not parts["calibration"] & parts["evaluation"]
    for keys in parts.values():
        assert sum(map(len, keys)) > 50_000


def test_a_text_file_is_tokenised_whole(tmp_path: Path, byte_tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("abc\n\ndefghij", encoding="utf-8")
    tokens = load_tokens(str(path), byte_tokenizer, samples=None, length=4, sampling="first")
    assert tokens.ids.tolist() == [list(b"abc\n"), list(b"\ndef"), list(b"ghij")]
    assert tokens.source == str(path)
    assert tokens.text_bytes == 12


def test_documents_are_joined_by_an_empty_line(tmp_path: Path, byte_tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "cd"}\n')
    tokens = load_tokens(str(path), byte_tokenizer, samples=1, length=6, sampling="first")
    assert bytes(tokens.ids[0].tolist()) == b"ab\n\ncd"


CHATS = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
    [{"role": "user", "content": "Why?"}],
]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CHATS))
    return path


def test_chats_are_the_text_that_the_tokenizers_template_makes_of_each(chats: Path):
    words = {"[UNK]": 0, "<u>": 1, "<a>": 2, "<end>": 3, "Hi": 4, "Ho": 5, "Why?": 6}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<u>", "<a>", "<end>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }} {{ m.content }} <end>{% endfor %}"
    )
    tokens = load_tokens(str(chats), tokenizer, samples=1, length=9, sampling="first")
    assert tokens.ids.tolist() == [[1, 4, 3, 2, 5, 3, 1, 6, 3]]
    each = [tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] for messages in CHATS]
    assert tokens.ids[0].tolist() == sum(each, [])


def test_chats_are_refused_without_a_template_and_among_other_texts(chats: Path, byte_tokenizer):
    with pytest.raises(TrisectError, match=r"line 1 is a chat, and the model's tokenizer has no chat template"):
        load_tokens(str(chats), byte_tokenizer, samples=1, length=4)
    with chats.open("a") as file:
        file.write('{"text": "and plain text"}\n')
    tokenizer = SimpleNamespace(chat_template="", apply_chat_template=lambda messages, tokenize: "x")
    with pytest.raises(TrisectError, match=r"line 3: a file of chats has messages in every entry"):
        load_tokens(str(chats), tokenizer, samples=1, length=4)


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
def test_the_builtin_source_needs_nothing_and_repeats_itself(split: str, byte_tokenizer):
    def draw(seed: int):
        return load_tokens("builtin", byte_tokenizer, samples=4, length=128, seed=seed, split=split)

    assert draw(0) == draw(0)
    assert draw(0).hash != draw(1).hash
    assert draw(0).text_bytes == 4 * 128


def write_letters(folder: Path) -> tuple[str, str]:
    for letter in "ab":
        (folder / f"{letter}.txt").write_text(letter * 50)
    return str(folder / "a.txt"), str(folder / "b.txt")


def test_a_mixture_shares_windows_and_shuffles_them(tmp_path: Path, byte_tokenizer):
    a, b = write_letters(tmp_path)
    tokens = load_tokens(f"{a}:0.7+{b}:0.3", byte_tokenizer, samples=10, length=5)
    letters = bytes(tokens.ids[:, 0].tolist()).decode()
    assert (letters.count("a"), letters.count("b")) == (7, 3)
    assert letters != "a" * 7 + "b" * 3
    assert (tokens.ids == tokens.ids[:, :1]).all()
    assert tokens.text_bytes == 50
    again = load_tokens(f"{a}:0.7+{b}:0.3", byte_tokenizer, samples=10, length=5)
    assert tokens == again


def test_a_source_named_twice_does_not_repeat_its_windows(byte_tokenizer):
    tokens = load_tokens("builtin+builtin", byte_tokenizer, samples=8, length=64)
    assert len({tuple(row) for row in tokens.ids.tolist()}) == 8


def test_mixtures_that_cannot_be_shared_out_are_refused(tmp_path: Path, byte_tokenizer):
    a, b = write_letters(tmp_path)
    with pytest.raises(TrisectError, match="number of windows"):
        load_tokens(f"{a}+{b}", byte_tokenizer, samples=None, length=5, sampling="first")
    with pytest.raises(TrisectError, match="gets none of the 1 windows"):
        load_tokens(f"{a}+{b}", byte_tokenizer, samples=1, length=5)


def test_tensors_and_tokens_are_used_as_they_are():
    ids = torch.arange(12).reshape(3, 4)
    tokens = load_tokens(ids, None, samples=128, length=2048)
    assert torch.equal(tokens.ids, ids)
    assert load_tokens(tokens, None, samples=1, length=1) is tokens


def test_files_of_ids_need_no_tokenizer(tmp_path: Path):
    stream, table = torch.arange(10), torch.arange(12).reshape(3, 4)
    save_file({"tokens": stream}, tmp_path / "stream.safetensors")
    save_file({"input_ids": table}, tmp_path / "table.safetensors")

    def first(name: str, length: int):
        path = str(tmp_path / name)
        return load_tokens(path, None, samples=2, length=length, sampling="first").ids

    assert torch.equal(first("stream.safetensors", 5), stream.reshape(2, 5))
    assert torch.equal(first("table.safetensors", 4), table[:2])


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(TrisectError, match="without a tokenizer"):
        load_tokens("builtin", None, samples=1, length=8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wikitext", "Did you mean wikitext2.*path to a text file"),
        ("absent.txt", "no file absent.txt.*looked from"),
        ("some/where", "no file some/where"),
        (".", "is a folder"),
    ],
)
def test_unknown_sources_say_what_there_is(name: str, words: str, byte_tokenizer):
    with pytest.raises(TrisectError, match=words):
        load_tokens(name, byte_tokenizer, samples=1, length=8)


def test_an_unknown_split_is_refused(byte_tokenizer):
    with pytest.raises(TrisectError, match="Did you mean evaluation"):
        load_tokens("builtin", byte_tokenizer, samples=1, length=8, split="evalution")


def test_every_listed_source_has_a_description():
    listed = dict(list_sources())
    assert {"builtin", "wikitext2", "c4", "slimpajama", "ptb"} <= set(listed)
    assert all(listed.values())


def test_a_real_tokenizer_adds_no_special_tokens_and_warns_of_nothing(assets: Path, caplog):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "models" / "stories15m")
    tokenizer.model_max_length = 256
    path = assets / "data" / "tinystories" / "tinystories.txt"
    logger = logging.getLogger("transformers")  # it does not propagate, so caplog must go to it
    caplog.set_level(logging.WARNING, logger="transformers")  # the command line turns it down for good
    logger.addHandler(caplog.handler)
    try:
        tokens = load_tokens(str(path), tokenizer, samples=20, length=256, sampling="first")
        assert not caplog.records
        text = path.read_text(encoding="utf-8")
        expected = tokenizer(text, add_special_tokens=False).input_ids
        assert "longer than the specified maximum" in caplog.text  # a warning would have been seen
    finally:
        logger.removeHandler(caplog.handler)
    assert tokens.ids.flatten().tolist() == expected[: 20 * 256]
    assert tokens.text_bytes is not None
    assert 2 < tokens.text_bytes / tokens.ids.numel() < 8
