"""`trisect export`: a compressed model as files that other software reads without trisect."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.commands._names import one_of
from trisect.errors import TrisectError, unknown_name

PANEL = "Use"
EXAMPLES = (
    ("A stock checkpoint, for transformers and vLLM", "trisect export small -o small-hf"),
    ("A file for llama.cpp", "trisect export small -o small.gguf --to gguf --dtype q8_0"),
)
FORMATS = ("hf", "gguf")


def run(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder that `trisect compress` wrote.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR|FILE",
            help="The new folder, or the GGUF file (NAME.gguf, or a folder for it).",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|gguf",
            help="hf: a stock checkpoint, for transformers. gguf: a file, for llama.cpp.",
            autocompletion=one_of(*FORMATS),
        ),
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="hf: float32, bfloat16 or float16 (default: the folder's own). gguf: f32, f16 or q8_0 "
            "(default: f16).",
            autocompletion=one_of("float32", "bfloat16", "float16", "f32", "f16", "q8_0"),
        ),
    ] = None,
    as_llama: Annotated[
        bool,
        typer.Option("--as-llama", help="Write a Mistral or Qwen2 model under Llama's architecture. (hf)"),
    ] = False,
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write a compressed model for transformers (vLLM, SGLang) or llama.cpp, checked against the original."""
    from trisect.commands._screen import keep_measurement, quiet_libraries

    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    if as_llama and to != "hf":
        raise TrisectError("--as-llama is about --to hf; a GGUF file has Llama's architecture always.")
    export = _hf if to == "hf" else _gguf
    with quiet_libraries():
        done = export(folder, out, dtype, as_llama=as_llama, trust_remote_code=trust_remote_code)
    _show(done, quiet=quiet)
    keep_measurement(json, done.facts)


@dataclass(frozen=True, kw_only=True)
class Done:
    """An export, for people and for JSON."""

    title: str
    rows: dict[str, str]
    lines: list[str]
    """How to load it."""
    facts: dict[str, Any]


def _hf(folder: str, out: Path, dtype: str | None, *, as_llama: bool, trust_remote_code: bool) -> Done:
    from trisect.commands._screen import load
    from trisect.export import export_hf
    from trisect.support.files import check_new_folder
    from trisect.support.receipt import read_receipt

    check_new_folder(out)
    kind = _dtype(folder, dtype, trust_remote_code)
    loaded = load(folder, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
    receipt = read_receipt(folder)
    done = export_hf(loaded.model, loaded.tokenizer, out, dtype=kind, as_llama=as_llama, receipt=receipt)
    size = sum(file.stat().st_size for file in done.path.rglob("*"))
    rows = {
        "architecture": f"{done.architecture}, head width {done.head_width}, {_widths(done.mlp_widths)}",
        "weights": f"{done.dtype}, {size / 1e6:.1f} MB",
        "logits": _nearness(done.difference, done.rounding, done.dtype),
    }
    return Done(
        title=f"Stock checkpoint in {done.path}",
        rows=rows,
        lines=_hf_lines(done.path, loaded.tokenizer),
        facts={**asdict(done), "path": str(done.path)},
    )


def _gguf(folder: str, out: Path, dtype: str | None, *, as_llama: bool, trust_remote_code: bool) -> Done:
    from trisect.commands._screen import load, quoted
    from trisect.export.gguf import export_gguf
    from trisect.support.receipt import read_receipt

    loaded = load(folder, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
    done = export_gguf(loaded.model, loaded.tokenizer, out, kind=dtype or "f16", receipt=read_receipt(folder))
    rows = {
        "architecture": f"{done.architecture}, head width {done.head_width}, {_widths(done.mlp_widths)}",
        "weights": f"{done.kind}, {done.path.stat().st_size / 1e6:.1f} MB",
        "logits": _nearness(done.difference, done.rounding, done.kind),
        "in llama.cpp": "not tried: `pip install xllamacpp` to have it checked there"
        if done.llama_cpp is None
        else f"runs; the next token's probabilities are {done.llama_cpp:.0e} nats apart",
    }
    return Done(
        title=f"GGUF file {done.path}",
        rows=rows,
        lines=[f"llama-cli -m {quoted(done.path)} -p 'Once upon a time'"],
        facts={**asdict(done), "path": str(done.path)},
    )


def _dtype(folder: str, dtype: str | None, trust_remote_code: bool) -> Any:
    from trisect.models.checkpoint import DTYPES, read_config
    from trisect.models.source import resolve

    if dtype is None:
        config = read_config(resolve(folder), trust_remote_code=trust_remote_code)
        return config.dtype or DTYPES["float32"]
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES, "f32, f16 and q8_0 are for --to gguf.")
    return DTYPES[dtype]


def _widths(mlp: tuple[int, ...]) -> str:
    return f"MLP width {mlp[0]}" if len(set(mlp)) == 1 else f"MLP widths {min(mlp)} to {max(mlp)}"


def _nearness(difference: float, rounding: float | None, kind: str) -> str:
    """How near the export is to the native model, for people."""
    exact = f"as the compressed model's, to {difference:.0e} of the largest"
    return exact if rounding is None else f"{exact}; {rounding:.0e} after rounding to {kind}"


def _hf_lines(path: Path, tokenizer: Any) -> list[str]:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = AutoModelForCausalLM.from_pretrained("{path}")',
    ]
    return lines if tokenizer is None else [*lines, f'tokenizer = AutoTokenizer.from_pretrained("{path}")']


def _show(done: Done, *, quiet: bool) -> None:
    from rich.table import Table

    from trisect.commands._screen import stdout

    console = stdout()
    table = Table(title=done.title, title_justify="left", show_header=False)
    for name, value in done.rows.items():
        table.add_row(name, value)
    console.print(table)
    for note in done.facts["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    if not quiet:
        console.print("Load it without trisect:")
        for line in done.lines:
            console.print(f"  {line}", soft_wrap=True)
