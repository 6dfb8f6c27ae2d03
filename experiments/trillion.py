"""What compressing a mixture of one trillion parameters with a3+ would take, and its collectives at a small shape.

    OMP_NUM_THREADS=1 .venv/bin/python experiments/trillion.py      # the small shape: 1, 2 and 4 processes, gloo

The tables of the large shape are computed, by `make results`: operations and bytes are counted from the shape,
and rates are those that experiments/scale_shapes.py measured of other mixtures on one H200.
"""

import math
import multiprocessing
import os
import socket
from dataclasses import dataclass
from typing import Any

import scale_shapes
import torch
import torch.distributed as dist
from operation_counts import KEPT, STATES, Shape, operations
from scale_shapes import SHAPES, Case, build
from tables import Entry, read, rows_of, sourced, table, write_rows

from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline.run import compress
from trisect.pipeline.statistics import ROOM
from trisect.support import distributed
from trisect.support.receipt import build_receipt

LAYERS = 61  # one of them without experts, counted as the others
LARGE = Shape(d_model=7168, mlp=2048, heads=64, kv_heads=8, head_dim=128, experts=384, active=8, shared=1)
"""Kimi K2's sizes; its latent attention is counted as eight key heads, which have about as many weights."""
TOKENS, LENGTH, BATCH = 1 << 20, 2048, 8192
NARROW_FLOAT = 2  # bytes of a weight or an activation
GPU, FREE = 141e9, 0.9  # bytes, and the share of them that torch gets
NVLINK, NETWORK, HOST, DISK = 400e9, 50e9, 50e9, 10e9
"""Bytes per second: of a GPU within a node of eight and between nodes, from main memory, and of a node's disks."""
NODE = 8
GPUS = (8, 16, 32, 64)
MEASURED = ("qwen3-30b-a3b", "gpt-oss-20b")


def measured(name: str) -> tuple[Shape, Entry, dict[str, float]]:
    """A shape that was run on a GPU with a3+, its row, and its seconds per layer by stage."""
    row = next(row for row in rows_of("scale-shapes.json") if (row["shape"], row["method"]) == (name, "a3+"))
    sizes = SHAPES[name]
    shape = Shape(
        d_model=sizes["hidden_size"],
        mlp=sizes.get("moe_intermediate_size", sizes["intermediate_size"]),
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"]),
        experts=sizes.get("num_experts", sizes.get("num_local_experts", 1)),
        active=sizes.get("num_experts_per_tok", 1),
    )
    return shape, row, {stage: value / row["layers"] for stage, value in row["receipt"]["timings"].items()}


@dataclass(frozen=True)
class Rates:
    """What one H200 did."""

    forward: float  # operations per second
    grams: float
    attention: float  # of solving W_o, at the same number of features
    gathered: float  # seconds for the Grams of one expert in one batch, however few its tokens
    expert: float  # seconds to solve one expert of LARGE's width


def rates() -> Rates:
    """Of the larger experts; seconds of an expert lie between two measured widths, on a line of logarithms."""
    found = {name: measured(name) for name in MEASURED}
    shape, row, seconds = found["gpt-oss-20b"]
    counted = operations(shape, "a3+", tokens=row["tokens"], length=LENGTH, refit=False)
    small, first, theirs = found["qwen3-30b-a3b"]
    low, high = theirs["mlp"] / small.experts, seconds["mlp"] / shape.experts
    place = math.log(LARGE.mlp / small.mlp) / math.log(shape.mlp / small.mlp)
    wide, most, spent = measured("llama-3.1-70b")
    solving = operations(wide, "a3+", tokens=most["tokens"], length=LENGTH, refit=False)["ov"]
    return Rates(
        forward=counted["forward"] / seconds["forward"],
        grams=counted["grams"] / seconds["grams"],
        attention=solving / spent["ov"],
        gathered=theirs["grams"] / (small.experts * first["tokens"] / BATCH),
        expert=low * (high / low) ** place,
    )


def weights() -> float:
    """Bytes of a layer's experts."""
    return (LARGE.experts + LARGE.shared) * 3 * LARGE.d_model * LARGE.mlp * NARROW_FLOAT


def sums() -> float:
    """Bytes of what all experts of a layer add up to."""
    return (LARGE.experts + LARGE.shared) * LARGE.expert_sums()


def attention_sums() -> float:
    """Bytes of W_o's regression."""
    return 2 * 8 * LARGE.attended * (LARGE.attended + LARGE.d_model)


def states(gpus: int) -> float:
    """Bytes of hidden states in one process."""
    return STATES * TOKENS * LARGE.d_model * NARROW_FLOAT / gpus


def writing() -> float:
    """Bytes of the narrow experts while they are written: solved, two maps of three joined, and stacked."""
    return (2 + 2 / 3) * KEPT * weights()


def passes(gpus: int) -> int:
    """Passes over the windows in which the experts' sums are gathered."""
    free = FREE * GPU - weights() - states(gpus)
    return math.ceil(sums() / (ROOM * free))


def peak(gpus: int) -> float:
    """Bytes on a GPU at the fuller of two moments: the last pass of gathering, and writing."""
    gathering = sums() / passes(gpus) + sums() / gpus
    return weights() + states(gpus) + max(gathering, writing())


def sent(gpus: int) -> dict[str, float]:
    """Bytes that a GPU sends for one layer."""
    others = (gpus - 1) / gpus
    return {"Grams": sums() * others, "experts": KEPT * weights() * others, "attention": 2 * attention_sums() * others}


def tokens_sent(gpus: int) -> float:
    """Bytes that a GPU would send if tokens went to their experts' owners: inputs, and targets in float32."""
    return TOKENS / gpus * LARGE.active * LARGE.d_model * (NARROW_FLOAT + 4) * (gpus - 1) / gpus


def work(gpus: int) -> dict[str, float]:
    """Operations of one layer by stage, on all GPUs."""
    found = operations(LARGE, "a3+", tokens=TOKENS, length=LENGTH, refit=False)
    again = (passes(gpus) - 1) * TOKENS * (LARGE.attention(LENGTH) + LARGE.mlps())
    named = {"forward": found["forward"] + again, "Grams": found["grams"]}
    return named | {"experts": found["mlp"], "attention": found["ov"], "backward": found["backward"]}


def seconds(gpus: int) -> dict[str, float]:
    """Of one layer, by stage; a layer is read from disk while the one before it is worked on."""
    rate, tokens, number, counted = rates(), TOKENS / gpus, LARGE.experts + LARGE.shared, work(gpus)
    wire = NVLINK if gpus <= NODE else NETWORK
    found = {
        "forward": counted["forward"] / gpus / rate.forward,
        "Grams": max(counted["Grams"] / gpus / rate.grams, number * math.ceil(tokens / BATCH) * rate.gathered),
        "sending": sum(sent(gpus).values()) / wire,
        "experts": math.ceil(number / gpus) * rate.expert,
        "attention": counted["attention"] / rate.attention,
        "loading": weights() / HOST,
        "writing": KEPT * weights() / DISK,
    }
    return found | {"waiting for the disk": max(0.0, weights() / DISK - sum(found.values()))}


def hours(gpus: int) -> float:
    """Of all layers, of the two walks before, forwards and back, for gradients, and of reading the result back."""
    before = max(work(gpus)["backward"] / rates().forward, 2 * weights() / DISK)
    return LAYERS * (sum(seconds(gpus).values()) + before + KEPT * weights() / DISK) / 3600


def provenance_rows() -> list[Entry]:
    return [measured(name)[1] for name in (*MEASURED, "llama-3.1-70b")]


def memory_table() -> str:
    """Where everything of a layer is."""
    each = "every process"
    lines = [
        ("weights, as they are", weights(), each, lambda gpus: weights()),
        ("narrow experts, while they are written", writing(), each, lambda gpus: writing()),
        ("hidden states, six sets", states(1), "by windows", states),
        ("sums of W_o's regression", attention_sums(), each, lambda gpus: attention_sums()),
        ("sums of the experts, own windows", sums(), "in passes", lambda gpus: sums() / passes(gpus)),
        ("sums of the experts, all windows", sums(), "by experts", lambda gpus: sums() / gpus),
    ]
    rows = [[what, gb(whole), how, gb(of(GPUS[0])), gb(of(GPUS[-1]))] for what, whole, how, of in lines]
    rows.append(["peak", "", "", gb(peak(GPUS[0])), gb(peak(GPUS[-1]))])
    return table(["one layer", "in all", "spread", *(f"on each of {gpus}" for gpus in (GPUS[0], GPUS[-1]))], rows)


def time_table() -> str:
    """Seconds of one layer by stage, what a GPU sends, and hours of all layers."""
    stages = list(seconds(GPUS[0]))
    counted = [f"{work(GPUS[0])[stage] / 1e15:.3g}" if stage in work(GPUS[0]) else "" for stage in stages]
    rows = [["operations, 10^15", *counted, "", "", "", ""]]
    for gpus in GPUS:
        found = seconds(gpus)
        alone = (LARGE.experts + LARGE.shared) * rates().expert - found["experts"]
        rows.append(
            [
                str(gpus),
                *(f"{found[stage]:.1f}" for stage in stages),
                f"{sum(found.values()):.0f}",
                " + ".join(f"{value / 1e9:.0f}" for value in sent(gpus).values()),
                f"{hours(gpus):.1f}",
                f"{hours(gpus) + LAYERS * alone / 3600:.1f}",
            ]
        )
    header = ["GPUs", *stages, "all", "GB sent", "hours", "without owners"]
    instead = ", ".join(f"{tokens_sent(gpus) / 1e9:.0f} GB on each of {gpus}" for gpus in GPUS)
    said = f"Tokens sent to their experts' owners, in the place of Grams, would be {instead}."
    made = f"{table(header, rows)}\n\n{said}"
    return sourced(made, provenance_rows(), "python experiments/scale_shapes.py --device cuda")


def gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


# The same collectives, run.

FILE = "trillion.json"
SMALL = Shape(d_model=256, mlp=128, heads=4, kv_heads=2, head_dim=64, experts=16, active=2)
PROCESSES = (1, 2, 4)
WINDOWS, SHORT = 32, 128


def take_part(rank: int, processes: int, port: int, answers: Any) -> None:
    """Compress in one of several processes; what it sends is counted."""
    given = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    torch.set_num_threads(1)
    scale_shapes.KINDS["small"] = "Qwen3Moe"
    scale_shapes.SHAPES["small"] = {
        "hidden_size": SMALL.d_model,
        "moe_intermediate_size": SMALL.mlp,
        "num_experts": SMALL.experts,
        "num_experts_per_tok": SMALL.active,
        "num_hidden_layers": 1,
        "num_attention_heads": SMALL.heads,
        "num_key_value_heads": SMALL.kv_heads,
        "head_dim": SMALL.head_dim,
        "vocab_size": 512,
    }
    model = build(Case(shape="small", method="a3+"), device="cpu", dtype=torch.float32)
    ids = torch.randint(0, 512, (WINDOWS, SHORT), generator=torch.Generator().manual_seed(0))
    tokens = tokens_from_tensor(ids, "random ids")
    config = CompressConfig(ratio=0.25, method="a3+", align=None, without=("refit-up",))
    reduced, sends = [0], dist.reduce

    def counted(value: torch.Tensor, dst: int) -> Any:
        reduced[0] += value.numel() * value.element_size() * (rank != dst)
        return sends(value, dst=dst)

    dist.reduce = counted
    with distributed.process_group("cpu"):
        result = compress(model, config, tokens=tokens)
    with torch.no_grad():
        logits = result.model(input_ids=ids[:2]).logits
    receipt = build_receipt(config.to_dict(), seed=0, token_hash=tokens.hash, timings=result.receipt["timings"])
    answers.put((rank, {"reduced_bytes": reduced[0], "logits": logits.tolist(), "receipt": receipt}))


def run(processes: int) -> list[Entry]:
    """What each of several processes says, by rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = [context.Process(target=take_part, args=(rank, processes, port, answers)) for rank in range(processes)]
    for process in running:
        process.start()
    found = [entry for _, entry in sorted((answers.get(timeout=600) for _ in running), key=lambda each: each[0])]
    for process in running:
        process.join()
    return found


def small_table() -> str:
    """Bytes that a process reduces, counted and computed, and how far its model is from that of one process."""
    rows = rows_of(FILE)
    lines = []
    for row in rows:
        kb = [" / ".join(f"{value / 1e3:,.0f}" for value in row[key]) for key in ("reduced_bytes", "computed_bytes")]
        apart = f"{row['largest_logit_difference']:.1e} of {row['largest_logit']:.2f}"
        lines.append([str(row["processes"]), *kb, "yes" if row["same_logits"] else "no", apart])
    header = ["processes", "KB of Grams sent by each", "computed", "the same in all", "largest logit difference"]
    return sourced(table(header, lines), [read(FILE)], "python experiments/trillion.py")


def main() -> None:
    rows, expected = [], None
    for processes in PROCESSES:
        found = run(processes)
        logits = [torch.tensor(entry.pop("logits")) for entry in found]
        expected = logits[0] if expected is None else expected
        owned = [len(range(rank, SMALL.experts, processes)) for rank in range(processes)]
        rows.append(
            {
                "processes": processes,
                "reduced_bytes": [entry["reduced_bytes"] for entry in found],
                "computed_bytes": [(SMALL.experts - mine) * SMALL.expert_sums() for mine in owned],
                "same_logits": all(torch.equal(one, logits[0]) for one in logits),
                "largest_logit_difference": (logits[0] - expected).abs().max().item(),
                "largest_logit": expected.abs().max().item(),
            }
        )
        print(rows[-1], flush=True)
    write_rows(FILE, rows, receipt=found[0]["receipt"])


TABLES = {"trillion-memory": memory_table, "trillion-time": time_table, "trillion-small": small_table}

if __name__ == "__main__":
    main()
