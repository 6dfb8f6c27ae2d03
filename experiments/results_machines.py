"""The sections of docs/results.md about time, memory and scale, in their order."""

from functools import partial

import machine_tables as machine
import results_figures as figures
import speed_tables as speed
from results_section import Section, files

MACHINES = (
    Section(
        name="stream",
        title="A model larger than the memory it is given",
        what="Compressed layer by layer (`--stream on`) and in memory, each in a process of its own.",
        command="python experiments/stream_cpu.py",
        entries=files("stream-cpu.json"),
        body=machine.stream_table,
        short=machine.stream_short,
    ),
    Section(
        name="ranks",
        title="Several processes",
        what=(
            "stories15m at 25% on 128 windows of 256 tokens with one thread per process (gloo). Stages in "
            "seconds; `share` is waiting for other processes."
        ),
        command="python experiments/ranks.py",
        entries=files("ranks.json"),
        body=machine.ranks_table,
        short=machine.ranks_short,
        pictures=figures.ranks_pictures,
    ),
    Section(
        name="kills",
        title="Runs that are killed",
        what=(
            "stories15m, `kill -9` at random moments; the same command goes on, and the bytes are compared "
            "with those of a run that nobody disturbed."
        ),
        command="python experiments/kill_and_resume.py",
        entries=files("kill-and-resume.json"),
        body=machine.kills_table,
    ),
    Section(
        name="fuzz",
        title="Hostile files",
        what=(
            "Good files of every kind with something made wrong, read by what a user would call "
            "(docs/security.md)."
        ),
        command="python experiments/fuzz.py",
        entries=files("fuzz.json"),
        body=machine.fuzz_table,
        short=machine.fuzz_short,
    ),
    Section(
        name="shapes",
        title="What compressing costs at true shapes",
        what=(
            "Random weights in main memory, layers streamed to one GPU, forward passes included: right for "
            "time and memory, and nothing about accuracy. A case of a few layers says what the whole model "
            "would take."
        ),
        command="python experiments/scale_shapes.py --device cuda",
        entries=machine.shapes,
        body=machine.shapes_table,
        pictures=figures.shapes_pictures,
    ),
    Section(
        name="growth",
        title="How the cost grows",
        what=(
            "One size at a time is doubled from a common start; the power is the slope of a straight line "
            "through the logarithms."
        ),
        command="python experiments/cost_growth.py --device cpu",
        entries=machine.growth_entries,
        body=machine.growth_table,
        pictures=figures.growth_pictures,
    ),
    *(
        Section(
            name=bench,
            title=f"Speed: {title}",
            what=(
                "Dense, narrow and factored (SVD-LLM) models in one run, beside what their FLOPs and bytes "
                "allow; docs/bench.md explains the columns."
            ),
            command=command,
            entries=partial(speed.receipts_of, bench),
            body=partial(speed.bench_tables, bench),
            short=partial(speed.bench_short, bench),
            pictures=partial(speed.pictures, bench),
        )
        for bench, (title, command) in speed.BENCHES.items()
    ),
    Section(
        name="short-prompts",
        title="Speed: short prompts, models in turn",
        what=(
            "Prefills that take as long as the host takes to launch them. Its pace drifts within a run, so "
            "all models are in memory and take turns; each lap has its own ratio to dense, and the median "
            "of those counts."
        ),
        command="python benchmarks/short_prompts.py --device cuda --json "
        "experiments/results/short-prompts.json",
        entries=files(speed.SHORT_PROMPTS),
        body=speed.short_prompts_table,
        short=speed.short_prompts_short,
    ),
    Section(
        name="rotary",
        title="Speed: the rotary kernel",
        what=(
            "Queries and keys of one layer turned, each key head at its own frequencies: the kernel, plain "
            "operations, and a compiler."
        ),
        command="python benchmarks/rotary.py --device cuda --json experiments/results/rotary.json",
        entries=lambda: list(speed.rotary_files().values()),
        body=speed.rotary_table,
    ),
)
