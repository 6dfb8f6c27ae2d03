"""Use a model elsewhere: `trisect export` writes files, `push` uploads them, `serve` starts a server."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Json, LoadOptions, TrustRemoteCode, argument, option, verb
from trisect.errors import TrisectError, check_names
from trisect.support import files
from trisect.support.receipt import read_receipt


@verb("Use")
def export(
    folder: Annotated[str, argument("A folder that `trisect compress` wrote.", "DIR")],
    out: Annotated[Path, option("The new folder, or the GGUF file (NAME.gguf, or a folder for it).", "DIR|FILE")],
    to: Annotated[str, option("For stock engines, llama.cpp, or LowRankArena.", "hf|gguf|arena")] = "hf",
    dtype: Annotated[str | None, option("By default the folder's own; gguf: f32, f16, q8_0.", "DTYPE")] = None,
    json: Json = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a compressed model for transformers (vLLM, SGLang, MLX-LM) or llama.cpp, checked against the original.

    A stock checkpoint, for transformers, vLLM and MLX-LM: trisect export small -o small-hf
    A file for llama.cpp: trisect export small -o small.gguf --to gguf --dtype q8_0
    """
    from trisect.export import NotPortable, export_arena, export_gguf, export_hf, portable_command
    from trisect.models import checkpoint

    check_names("format", [to], ("hf", "gguf", "arena"))
    with screen.quiet_libraries():
        if to != "gguf":
            files.check_new_folder(out)
            check_names("dtype", [dtype] if dtype else [], checkpoint.DTYPES, "f32, f16 and q8_0 are for --to gguf.")
        receipt = read_receipt(folder)
        loaded = screen.load(folder, LoadOptions(dtype="float32", trust_remote_code=trust_remote_code))
        what: Any = {"model": loaded.model, "tokenizer": loaded.tokenizer, "receipt": receipt, "out": out}
        if to == "gguf":
            what["kind"] = dtype or "f16"
        else:
            what["dtype"] = checkpoint.DTYPES[dtype] if dtype else loaded.model.stored_dtype
        try:
            write: Any = {"hf": export_hf, "arena": export_arena, "gguf": export_gguf}[to]
            done = write(**what)
        except NotPortable as error:
            again = portable_command(loaded.model, receipt or {}, folder)
            raise TrisectError(f"{error} The nearest that can: {again}") from error
    _show(done, to, tokenizer=loaded.tokenizer is not None)
    screen.keep_measurement(json, {**asdict(done), "path": str(done.path)})


def _show(done: Any, to: str, *, tokenizer: bool) -> None:
    from trisect.bundle import weights_size

    path, mlp = done.path, done.mlp_widths
    size = path.stat().st_size if to == "gguf" else weights_size(path)
    widths = f"MLP width {mlp[0]}" if len(set(mlp)) == 1 else f"MLP widths {min(mlp)} to {max(mlp)}"
    rounded = "" if done.rounding is None else f"; {done.rounding:.0e} after rounding to {done.dtype}"
    rows = [
        ("architecture", f"{done.architecture}, head width {done.head_width}, {widths}"),
        ("weights", f"{done.dtype}, {size / 1e6:.1f} MB"),
        ("logits", f"as the compressed model's, to {done.difference:.0e} of the largest{rounded}"),
    ]
    if to == "gguf":
        title, nats = f"GGUF file {path}", done.llama_cpp
        ran = f"runs; the next token's probabilities are {nats:.0e} nats apart" if nats is not None else None
        rows.append(("in llama.cpp", ran or "not tried: `pip install xllamacpp` to have it checked there"))
        lines = [f"llama-cli -m {screen.quoted(path)} -p 'Once upon a time'"]
    else:
        title, lines = f"Stock checkpoint in {path}", ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
        lines.append(f'model = AutoModelForCausalLM.from_pretrained("{path}")')
        lines += [f'tokenizer = AutoTokenizer.from_pretrained("{path}")'] if tokenizer else []
    screen.say_table((), rows, title=title, show_header=False)
    screen.say(*(f"note: {note}" for note in done.notes))
    if not screen.running().quiet:
        screen.say("Load it without trisect:", *(f"  {line}" for line in lines))


@verb("Use")
def push(
    folder: Annotated[Path, argument("A folder that `trisect compress` or `trisect export` wrote.", "DIR")],
    repo: Annotated[str, argument("Where on the hub: NAME, or OWNER/NAME.", "REPO")],
    public: Annotated[bool, option("Let everybody see it; a new repository is private otherwise.")] = False,
) -> None:
    """Upload a folder to the Hugging Face hub, private unless asked. Needs `hf auth login`.

    A private repository of yours: trisect push small-hf small-llama
    One that everybody sees: trisect push small-hf my-team/small-llama --public
    """
    from trisect.export import upload

    screen.say(f"Uploaded to {upload(folder, repo, private=not public)}")


@verb("Use")
def serve(
    model: Annotated[str, argument("Compressed folder, stock folder, or hub id.", "MODEL")],
    extra: Annotated[list[str] | None, argument("Options of the server itself, behind --.", "[-- OPTION...]")] = None,
) -> None:
    """Start vLLM's OpenAI server for a model, or transformers' own where vLLM is not installed.

    Serve a compressed folder: trisect serve small
    On another port, two GPUs: trisect serve small -- --port 9000 --tensor-parallel-size 2
    """
    from trisect import serve as server

    if model.startswith((".", "/", "~")) and not (Path(model).expanduser() / "config.json").exists():
        raise TrisectError(f"{model} is no model folder: it has no config.json.")
    command = server.server_command(model, extra or ())
    name = command[2].split(".")[0] if command[1] == "-m" else "transformers serve"
    screen.say(f"starting {name}; once it answers:", server.request_line(model, extra or ()))
    server.serve(command)
