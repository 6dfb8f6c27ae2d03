"""What the tests of the report share: a run, files of measurements, and a reader of pages."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tiny_models import character_tokenizer, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.models import save_model
from trisect.pipeline.run import compress

HOSTILE = "</script></title><img src=x onerror=\"document.title='broken'\"><svg onload=alert(1)>'\"&<!--"
"""Text that would act if it reached a page as it is."""
TEXT_HASH = "a" * 64


def make_run(folder: Path) -> Path:
    """Compress a tiny model and save it beside the dense one, with a tokenizer of single characters."""
    tokenizer = character_tokenizer(eos_token="<unk>")
    dense = tiny("llama-gqa")
    dense.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    config = CompressConfig(ratio=0.25, method="a3", align=None)
    made = compress(dense, config, tokens=tokens_from_tensor(tokens(4, 40)))
    measured = {"before": perplexity_entry(20.0), "after": perplexity_entry(25.0)}
    receipt = {**made.receipt, "source": str(folder / "dense"), "perplexity": measured}
    return save_model(made.model, tokenizer, folder / "run", receipt=receipt)


def perplexity_entry(value: float | None, *, token_hash: str = TEXT_HASH, data: str = "text.txt") -> dict[str, Any]:
    return {"perplexity": value, "data": data, "windows": 2, "length": 32, "token_hash": token_hash}


def eval_file(path: Path, model: object, **entries: Any) -> Path:
    """What `trisect eval --json` writes."""
    path.write_text(json.dumps({"model": str(model), **entries}))
    return path


def tasks_entry(**scores: float) -> dict[str, Any]:
    entries = {
        name: {"metric": "acc,none", "shots": 0, "questions": 50, "value": value} for name, value in scores.items()
    }
    return {"scores": entries, "average": sum(scores.values()) / len(scores)}


def bench_file(path: Path, subject: object, *, dense: float, narrow: float) -> Path:
    """What `trisect bench --json` writes, as far as the report reads it; seconds of one step."""
    case = {"subject": str(subject), "phase": "decode", "attention": "sdpa", "mode": "plain"}
    case |= {"batch": 1, "length": 64, "new": 8, "dtype": "float32", "device": "a cpu"}
    case |= {"widths": "4/4/8", "folded": False, "layers": 2, "of_layers": 2}
    rows = []
    for kind, asked, seconds in (("dense", "", dense), ("trisect", "checkpoint", narrow), ("svd-llm", "", 9.0)):
        row = {"case": {**case, "kind": kind, "asked": asked}, "times": {"p50": seconds}}
        rows.append({**row, "tokens_per_second": 1 / seconds})
    rows.append({"case": {**case, "kind": "trisect", "asked": "checkpoint"}, "error": "no memory"})
    path.write_text(json.dumps({"format": 1, "rows": rows, "receipts": []}))
    return path


@dataclass
class Element:
    name: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A page as a browser would take it apart: elements with the text directly inside them."""

    elements: list[Element] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> "Page":
        page = cls()
        HTMLParser.__init__(page, convert_charrefs=True)
        page.open: list[Element] = []
        page.feed(text)
        page.close()
        assert not page.open, page.open
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in {"meta", "br", "input", "col"}:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1].text += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def all(self, name: str) -> list[Element]:
        return [element for element in self.elements if element.name == name]

    @property
    def text(self) -> str:
        return "\n".join(element.text for element in self.elements if element.name not in {"script", "style"})
