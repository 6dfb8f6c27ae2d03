"""Does a3+ give the same answer everywhere, what should it be calibrated on, and how good is it? Four tables of rows.

    .venv/bin/python experiments/trust.py spread                    # this CPU, every row that is missing
    .venv/bin/python experiments/trust.py spread --device cuda      # one GPU, in three precisions
    .venv/bin/python experiments/trust.py texts --device cuda       # calibration texts and window counts
    .venv/bin/python experiments/trust.py few --device cuda         # a handful of tokens of another kind of text
    .venv/bin/python experiments/trust.py accuracy --device cuda    # a3, a3+ also balanced, svd-llm and asvd
    .venv/bin/python experiments/trust.py spread --model stories15m --workers 2 --seconds 500
    .venv/bin/python experiments/trust.py spread --again            # also what another CPU has measured

Rows go to experiments/results/spread.json, calibration-texts.json, few-tokens.json and accuracy.json; what is
there is not run again. Each row is a process of its own, because instruction sets and threads are settled when
torch starts.
Synthetic text is runs/synthetic-MODEL.jsonl, written once: `trisect sample smollm2-135m -o
runs/synthetic-smollm2-135m.jsonl --samples 320 --batch-size 160` on a GPU, for story models `trisect sample
../shared/models/MODEL -o runs/synthetic-MODEL.jsonl --samples 480 --batch-size 480 --length 256`.
SmolLM2-135M is dequantised from 4 bits. A quarter is removed unless a row says otherwise, widths exact.
Options of a3+ are chosen on Alpaca, held-out windows and stories of the calibration half, never on what is judged.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
ASSETS = Path(os.environ.get("TRISECT_ASSETS") or ROOT.parent / "shared")
FILES = {
    "spread": "spread.json",
    "texts": "calibration-texts.json",
    "few": "few-tokens.json",
    "accuracy": "accuracy.json",
}
INSTRUCTIONS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "sse4": {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"},
}
STORIES = ("stories15m", "stories-mpt-20m", "stories-moe-22m")
GEMMA = "gemma-3-270m"
MODELS = {"smollm2-135m": "smollm2-135m", GEMMA: GEMMA, **{name: f"models/{name}" for name in STORIES}}
MIXTURE = ["wikitext-2", "c4", "wikipedia"]
REMOVED: dict[Any, float] = {(GEMMA, 0.125): 0.11, (GEMMA, 0.25): 0.217, (GEMMA, 0.375): 0.323}
"""What uniform widths remove where queries and keys of most layers stay whole: as much as everyone else shall."""
MEASURED = ("removed", "perplexity", "receipt")
"""What a row has beside its cell."""
WIKIPEDIA_SHARE = 0.8
"""Of Wikipedia's text calibrates, the rest evaluates; of TinyStories, half."""

Cell = dict[str, Any]


def spread_cells(device: str) -> list[Cell]:
    """The same seed on every machine, thread count and batch size; other seeds; a3 and the dense model."""
    cells = []
    for model in ("smollm2-135m", "stories15m", "stories-mpt-20m"):
        story = model.startswith("stories")
        length, large = (256, 256) if story else (512, 2048)
        text = "tinystories" if story else "wikitext-2"
        base = {"model": model, "calibration": [text], "device": device}
        if device == "cpu":
            base |= {"length": length, "evaluate": {text: [32, length]}}
            usual = {"batch": 4, "threads": 2, "isa": "native"}
            cells.append({**base, **usual, "seed": 0, "windows": 0, "method": "dense"})
            for seed, windows in ((s, w) for s in range(3) for w in (12, 4)):
                plain = {**base, **usual, "seed": seed, "windows": windows}
                cells += [{**plain, "method": "a3"}, {**plain, "method": "a3+"}]
            cells += [
                {**base, "seed": s, "windows": 12, "batch": b, "threads": t, "isa": i, "method": "a3+"}
                for s in range(3)
                for b in (4, 1)
                for t in (1, 2)
                for i in INSTRUCTIONS
            ]
        else:
            base |= {"length": large, "evaluate": {text: [32, large]}}
            exact = {"seed": 0, "precision": "float32"}
            cells.append({**base, **exact, "windows": 0, "method": "dense"})
            cells += [
                {**base, "windows": 64, "seed": s, "precision": p, "method": m}
                for s in range(3)
                for p in ("float32", "tf32", "bfloat16")
                for m in ("a3", "a3+")
            ]
    return [cell for number, cell in enumerate(cells) if cell not in cells[:number]]


def text_cells(device: str) -> list[Cell]:
    """SmolLM2 calibrated on one text, on mixtures, and on what can be had without any."""
    reported = {name: [32, 2048] for name in ("wikitext-2", "c4", "wikipedia", "lambada")}
    evaluate = {**reported, "tinystories": [14, 2048], "alpaca": [32, 2048], "builtin": [14, 2048]}
    wanted: list[tuple[list[str], int]] = [(MIXTURE, n) for n in (64, 128, 256, 512)]
    # Without the hub: 64 windows side by side, then as many as a GPU (256) and a CPU take by default.
    wanted += [(["builtin"], 64), (["synthetic"], 64), (["builtin", "synthetic"], 64), (["synthetic"], 256)]
    wanted += [(["synthetic"], 16), (["builtin"], 32), (["builtin", "synthetic"], 32), (["synthetic"], 8)]
    wanted += [(["wikitext-2"], 64), (["wikitext-2"], 256), (["wikitext-2", "c4"], 64)]
    wanted += [(["c4", "wikipedia"], 256), (["c4"], 64), (["c4"], 256)]
    base = {"model": "smollm2-135m", "seed": 0, "length": 2048, "evaluate": evaluate, "device": device}
    cells = [{**base, "method": "dense", "windows": 0, "calibration": []}]
    for texts, windows in wanted:
        cells.append({**base, "method": "a3+", "windows": windows, "calibration": texts})
    cells += [{**base, "method": "a3+", "windows": 256, "calibration": MIXTURE, "seed": s} for s in (1, 2)]
    cells += [{**base, "method": "a3", "windows": n, "calibration": MIXTURE} for n in (64, 256)]
    cells += [{**base, "method": "a3", "windows": 64, "calibration": [t]} for t in ("builtin", "wikitext-2")]
    return cells


def few_cells(device: str) -> list[Cell]:
    """SmolLM2 calibrated on next to nothing of one kind of text, and judged on others."""
    evaluate = {name: [32, 512] for name in ("wikitext-2", "c4", "alpaca", "builtin")}
    base = {"model": "smollm2-135m", "length": 512, "evaluate": evaluate, "device": device}
    return [
        {**base, "method": method, "windows": 4, "calibration": ["builtin"], "seed": seed}
        for seed in range(3)
        for method in ("a3", "a3+")
    ]


def story_base(model: str, device: str) -> Cell:
    """A story model: its half of TinyStories, and four times as much that it writes itself."""
    base = {"model": model, "calibration": ["tinystories", "synthetic"], "counts": [112, 400], "windows": 512}
    base |= {"length": 256, "evaluate": {"tinystories": [96, 256]}, "device": device}
    return base | ({"threads": 1} if device == "cpu" else {})


def mixture_base(model: str, device: str) -> Cell:
    """A model of general text on the mixture, judged on its texts and on two that took no part."""
    large = device == "cuda"
    reported = [*MIXTURE, "lambada", "tinystories", "alpaca"]
    base = {"model": model, "calibration": MIXTURE, "windows": 256 if large else 32, "device": device}
    base |= {"length": 2048 if large else 512}
    base["evaluate"] = {t: [32 if large and t != "tinystories" else 14, base["length"]] for t in reported}
    return base | ({} if large else {"threads": 1})


def accuracy_cells(device: str) -> list[Cell]:
    """Every model at three sizes, each method on the same tokens; three seeds in the middle, for a3, a3+ and --best."""
    cells = []
    mixed = [mixture_base(model, device) for model in ("smollm2-135m", GEMMA)]
    for base in (*mixed, *(story_base(model, device) for model in STORIES)):
        cells.append({**base, "method": "dense", "seed": 0, "ratio": 0.0})
        best = {"method": "a3+", "allocate": "balanced", "refine": True}
        ours = [best, {"method": "a3"}, {"method": "a3+"}]
        others = [] if base["model"] == "stories-moe-22m" else [{"method": "svd-llm"}, {"method": "asvd"}]
        for ratio, seed in [(0.25, 0), (0.25, 1), (0.25, 2), (0.375, 0), (0.125, 0)]:
            methods = ours + (others if seed == 0 else [])
            cells += [{**base, **method, "ratio": ratio, "seed": seed} for method in methods]
    return sorted(cells, key=lambda cell: cell["method"] == "asvd")  # which takes longest, and is no method of ours


CELLS = {"spread": spread_cells, "texts": text_cells, "few": few_cells, "accuracy": accuracy_cells}


def read_text(name: str, *, split: str, model: str = "smollm2-135m") -> str:
    """The text of one half of what is at hand; synthetic text is the model's own."""
    data = ASSETS / "data"
    if name == "wikitext-2":
        return (data / "wikitext-2" / f"{'valid' if split == 'calibration' else 'test'}.txt").read_text("utf-8")
    if name == "c4" and split == "calibration":
        lines = (data / "c4/c4_demo.jsonl").read_text("utf-8").splitlines()
        return "\n\n".join(json.loads(line)["text"] for line in lines)
    if name == "c4":
        return (data / "c4/c4.txt").read_text("utf-8")
    if name == "wikipedia":
        text = (data / "wikipedia/wiki.txt").read_text("utf-8")
        edge = int(len(text) * WIKIPEDIA_SHARE)
        return text[:edge] if split == "calibration" else text[edge:]
    if name == "tinystories":
        stories = (data / "tinystories/tinystories.txt").read_text("utf-8").split("<|endoftext|>")
        return "\n\n".join(story.strip() for story in stories[split == "evaluation" :: 2])
    if name == "alpaca":
        examples = json.loads((data / "alpaca/alpaca_en_demo.json").read_text("utf-8"))
        fields = ("instruction", "input", "output")
        return "\n\n".join("\n".join(e[f] for f in fields if e.get(f)) for e in examples)
    if name == "lambada":
        lines = (data / "tasks/lambada_openai.jsonl").read_text("utf-8").splitlines()[:1500]
        return "\n\n".join(e["context"] + e["continuation"] for e in map(json.loads, lines))
    if name == "synthetic":
        lines = (ROOT / f"runs/synthetic-{model}.jsonl").read_text("utf-8").splitlines()
        return "\n\n".join(json.loads(line)["text"] for line in lines)
    from trisect.data.catalogue import builtin_documents

    return "\n\n".join(builtin_documents(split=split))


def load(cell: Cell) -> Any:
    """The cell's model on its device, in the cell's precision, with its tokenizer."""
    import torch
    from gemma import load_gemma

    from trisect.models import load_model

    if cell["device"] == "cpu":
        torch.set_num_threads(cell["threads"])
    tf32 = cell.get("precision") == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if cell["model"] == GEMMA:
        return load_gemma(cell["device"])
    name = MODELS[cell["model"]]
    dtype = "bfloat16" if cell.get("precision") == "bfloat16" else "float32"
    path = name if name == cell["model"] else str(ASSETS / name)
    return load_model(path, dtype=dtype, device=cell["device"], trust_remote_code=False)


def cut(cell: Cell, tokenizer: Any, text: str, count: int, *, split: str, seed: int = 0) -> Any:
    """Windows of one half of a text: random ones to calibrate, the first ones to judge."""
    from trisect.data.load import bos_of, tokenize
    from trisect.data.tokens import started, windows

    ids, bos = tokenize(read_text(text, split=split, model=cell["model"]), tokenizer, source=text), bos_of(tokenizer)
    sampling = "random" if split == "calibration" else "first"
    found = windows(ids, samples=count, length=cell["length"] - (bos is not None), sampling=sampling, seed=seed)
    return started(found, bos)


def compressed(cell: Cell, loaded: Any) -> Any:
    """The model in `loaded`, compressed as the cell says; None for the dense one."""
    import torch

    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.data import tokens_from_tensor
    from trisect.pipeline.run import compress

    if cell["method"] == "dense":
        return None
    texts, n = cell["calibration"], cell["windows"]
    counts = cell.get("counts") or [n // len(texts) + (i < n % len(texts)) for i in range(len(texts))]
    pieces = [
        cut(cell, loaded.tokenizer, t, c, split="calibration", seed=cell["seed"] + i)
        for i, (t, c) in enumerate(zip(texts, counts, strict=True))
    ]
    order = torch.Generator().manual_seed(cell["seed"])
    tokens = tokens_from_tensor(torch.cat(pieces)[torch.randperm(n, generator=order)], "+".join(texts))
    calibration = CalibrationConfig(
        source=tokens.source, samples=n, length=cell["length"], seed=cell["seed"], batch_size=cell.get("batch")
    )
    balanced = cell.get("allocate") == "balanced"
    asked, uniform = cell.get("ratio", 0.25), cell["method"] in ("a3", "a3+") and not balanced
    config = CompressConfig(
        ratio=asked if uniform else REMOVED.get((cell["model"], asked), asked),
        method=cell["method"],
        allocate=cell.get("allocate"),
        refine=cell.get("refine", False),
        without=tuple(cell.get("without", ())),
        align=None,
        calibration=calibration,
        seed=cell["seed"],
    )
    curves = ROOT / "runs" / f"curves-{cell['model']}-{tokens.hash[:16]}.json"  # one for all sizes
    curves.parent.mkdir(exist_ok=True)
    return compress(loaded.model, config, tokens=tokens, curves=curves if balanced else None)


def run_cell(cell: Cell) -> dict[str, Any]:
    """One row: compress, measure, and everything that is needed to doubt it."""
    from trisect.data import tokens_from_tensor
    from trisect.evaluate.perplexity import perplexity
    from trisect.models import shape_of
    from trisect.plan import budget_of
    from trisect.support.receipt import build_receipt

    loaded = load(cell)
    # Before the work: a text that is too short is found now.
    judged = {
        text: tokens_from_tensor(cut(cell, loaded.tokenizer, text, count, split="evaluation")[:, :length], text)
        for text, (count, length) in cell["evaluate"].items()
    }
    before, started = budget_of(shape_of(loaded.model)).linear_parameters, time.time()
    found = compressed(cell, loaded)
    model, seconds = loaded.model if found is None else found.model, time.time() - started
    removed = 1 - budget_of(shape_of(model)).linear_parameters / before
    # Gemma's logits of one window are 2 GB.
    batch = 1 if cell["model"] == GEMMA else None
    measured = {text: perplexity(model, tokens, batch_size=batch).perplexity for text, tokens in judged.items()}
    token_hash = None if found is None else found.receipt["token_hash"]
    whole = build_receipt(cell, seed=cell["seed"], token_hash=token_hash, timings={"compress": seconds})
    receipt = {k: v for k, v in whole.items() if k != "recipe"}
    return {**cell, "removed": removed, "perplexity": measured, "receipt": receipt}


def run_in_a_process(cell: Cell) -> dict[str, Any]:
    settings = {**INSTRUCTIONS[cell.get("isa", "native")]}
    if "threads" in cell:
        settings["OMP_NUM_THREADS"] = str(cell["threads"])
    if cell["device"] == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""  # so that its receipt does not name a GPU that had no part
    done = subprocess.run(
        [sys.executable, __file__, "cell", json.dumps(cell)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{cell} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def share_memory(workers: int) -> None:
    """Whoever asks for the free memory of the device is told this process's share of it."""
    import torch

    ask = torch.cuda.mem_get_info

    def share(*device: Any) -> tuple[int, int]:
        free, total = ask(*device)
        return min(free, total // (workers + 1)), total

    torch.cuda.mem_get_info = share


def gpu_workers(workers: int) -> ProcessPoolExecutor:
    """Processes that share a GPU, and are not started anew for each cell: that takes as long as a small one."""
    return ProcessPoolExecutor(workers, get_context("spawn"), initializer=share_memory, initargs=(workers,))


def run_missing(table: str, given: argparse.Namespace) -> None:
    """Run what the file lacks, and write it after every row."""
    from trisect.support.files import write_json
    from trisect.support.receipt import hardware

    path = RESULTS / FILES[table]
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    cells = CELLS[table](given.device)
    cells = [c for c in cells if given.model in (None, c["model"]) and given.method in (None, c["method"])]
    mine = hardware()["cpu"]
    counted = [r for r in rows if not given.again or r["receipt"]["hardware"]["cpu"] == mine]
    known = [{k: r[k] for k in r if k not in MEASURED} for r in counted]
    missing = [c for c in cells if c not in known]
    end = time.time() + given.seconds

    pool = gpu_workers(given.workers) if given.device != "cpu" else None

    def run(cell: Cell) -> None:
        if time.time() > end:
            return
        rows.append(run_in_a_process(cell) if pool is None else pool.submit(run_cell, cell).result())
        write_json(path, {"rows": sorted(rows, key=lambda r: json.dumps(r, sort_keys=True))})
        print(f"{len(rows)} rows, newest {cell}: {rows[-1]['perplexity']}", flush=True)

    with ThreadPoolExecutor(given.workers) as threads:
        for finished in [threads.submit(run, cell) for cell in missing]:
            if error := finished.exception():
                print(error, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*FILES, "cell"])
    parser.add_argument("cell", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--method", help="only rows of this one")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after that")
    parser.add_argument("--again", action="store_true", help="what only another CPU has measured, too")
    given = parser.parse_args()
    if given.table == "cell":
        print(json.dumps(run_cell(json.loads(given.cell))))
    else:
        run_missing(given.table, given)


if __name__ == "__main__":
    main()
