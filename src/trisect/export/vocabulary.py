"""A Hugging Face tokenizer as the entries of a GGUF file that llama.cpp rebuilds it from."""

import copy
import json
import logging
import re
from typing import Any

from gguf import TokenType
from tokenizers import pre_tokenizers

from trisect.errors import TrisectError

log = logging.getLogger(__name__)

NOTE = "the tokenizer splits digits again, a step that transformers leaves out when it reads GGUF"


def split_digits(tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, repaired where digits were evidently split when its vocabulary was made; and a note."""
    # GGUF files name this step, transformers drops it, and then runs of spaces and lines before a number become
    # other tokens. What remains to be seen is a vocabulary of single digits without any longer number.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _lost(json.loads(backend.to_str())):
        return tokenizer, ()
    repaired, words = copy.deepcopy(tokenizer), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    repaired.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return repaired, (NOTE,)


def _lost(data: dict[str, Any]) -> bool:
    words = data.get("pre_tokenizer") or {}
    plain = words.get("type") == "ByteLevel" and words.get("use_regex", True)
    vocabulary = data["model"].get("vocab") or {}
    if not plain or words.get("add_prefix_space") or not isinstance(vocabulary, dict):
        return False
    return set("0123456789") <= set(vocabulary) and not any(re.search("[0-9]{2}", token) for token in vocabulary)


BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {WORDS + r"\p{N}{1,3}" + REST: "llama-bpe", WORDS + r"\p{N}" + REST: "qwen2"}
"""Regular expressions that cut a text into words -> llama.cpp's name for them."""


def vocabulary_of(tokenizer: Any, size: int) -> dict[str, Any]:
    """A fast BPE tokenizer, padded to the `size` of the embedding, by the names of GGUFWriter's `add_` methods."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        none = "A GGUF file needs a tokenizer, and this folder has none that can be read (tokenizer.json)"
        raise TrisectError(f"{none}: put the original model's tokenizer files into it.")
    data = json.loads(backend.to_str())
    model = data["model"]
    if model["type"] != "BPE":
        raise TrisectError(f"The tokenizer is a {model['type']}, and only BPE is written to GGUF; use --to hf.")
    tokens, types = _tokens(data, tokenizer, size)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    pieces = bool(model.get("byte_fallback"))
    ids = tokenizer("a").input_ids
    template = getattr(tokenizer, "chat_template", None)
    entries = {
        "tokenizer_model": "llama" if pieces else "gpt2",  # pieces as SentencePiece has them, or merges of bytes
        "tokenizer_pre": "default" if pieces else _words(data.get("pre_tokenizer")),
        "token_list": tokens,
        "token_types": types,
        "token_scores": _scores(tokens, merges) if pieces else None,
        "token_merges": None if pieces else merges,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")},
        "add_bos_token": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "add_eos_token": bool(ids) and ids[-1] == tokenizer.eos_token_id,
        "add_space_prefix": _adds_space(data) if pieces else None,
        "chat_template": template if isinstance(template, str) else None,
    }
    return {name: value for name, value in entries.items() if value is not None}


def _tokens(data: dict[str, Any], tokenizer: Any, size: int) -> tuple[list[str], list[int]]:
    by_id = {index: token for token, index in data["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in data.get("added_tokens") or ()}
    by_id |= {index: entry["content"] for index, entry in added.items()}
    if by_id and max(by_id) >= size:
        apart = f"The tokenizer has {max(by_id) + 1} tokens and the model {size} embeddings"
        raise TrisectError(f"{apart}: put the original model's tokenizer files into the folder.")
    tokens, types = [], []
    for index in range(size):
        token = by_id.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            types.append(TokenType.UNUSED)
        elif index == tokenizer.unk_token_id and data["model"].get("byte_fallback"):
            types.append(TokenType.UNKNOWN)  # merges of bytes know everything, and use it for something else
        elif index in added:
            types.append(TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.BYTE if BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL)
    return tokens, [int(kind) for kind in types]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores that make llama.cpp merge in the same order: it joins the pair with the highest score first."""
    # A tokenizer.json made from SentencePiece lists every way to make a piece, best pieces first, so a piece's
    # first place in the list is its rank. What no merge makes is never looked up.
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _adds_space(data: dict[str, Any]) -> bool:
    """Whether a text gets a space in front of it."""
    if any(part["type"] == "Prepend" for part in _parts(data.get("normalizer"), "normalizers")):
        return True
    spaces = [part for part in _parts(data.get("pre_tokenizer"), "pretokenizers") if part["type"] == "Metaspace"]
    return any(part.get("prepend_scheme", "always") != "never" for part in spaces)


def _words(pre: dict[str, Any] | None) -> str:
    """llama.cpp's name for the way a text is cut into words."""
    parts = _parts(pre, "pretokenizers")
    kinds = [part["type"] for part in parts]
    by_regex = bool(parts) and kinds[-1] == "ByteLevel" and parts[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and by_regex:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and by_regex and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not by_regex:
        name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    log.warning(
        "llama.cpp has no known name for how this tokenizer cuts words (%s); the file says `default`, and "
        "some texts may become other tokens",
        ", ".join(kinds) or "not at all",
    )
    return "default"


def _parts(entry: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if entry is None:
        return []
    return list(entry[name]) if entry["type"] == "Sequence" else [entry]
