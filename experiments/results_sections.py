"""The sections of docs/results.md in their order: what was run, by which command, and what falls short."""

from functools import partial

import a3plus_tables as a3plus
import accuracy_tables as accuracy
import own_words_tables as own_words
import portable_tables as portable
import quantise_tables as quantise
import results_figures as figures
from results_machines import MACHINES
from results_section import Section, files
from tables import Entry, found

PROTOCOL = "python experiments/a3plus_protocol.py"
CALIBRATED = {
    "": "WikiText-2",
    "-mixed": "WikiText-2 and C4",
    "-own": "WikiText-2 and the model's own words",
}
"""Ending of a section of tasks -> what its models were calibrated on."""


def _tasks(folder: str, rows: str) -> list[Entry]:
    return files(rows)() if found(f"{folder}/*.json") else []


def _quantise_pictures() -> dict[str, bytes]:
    drawn = [s for s in quantise.STUDIES if any(p.setting != "whole" for p in quantise.points(s))]
    return {f"quantise-{study}.svg": quantise.figure(study) for study in drawn}


def _quantise() -> str:
    tables = [
        f"{quantise.STUDIES[s]}:\n\n{quantise.pareto_table(s)}"
        for s in quantise.STUDIES
        if quantise.points(s)
    ]
    cost = f"What four bits cost a dense and a narrow model:\n\n{quantise.orthogonal_table('stories15m')}"
    return "\n\n".join([cost, *tables])


def _finetune() -> str:
    from finetune_smollm2 import table

    return table()


ACCURACY = (
    Section(
        name="core",
        title="The paper's A3 on small real models",
        what=(
            "Method `a3` with the paper's exact ranks. SmolLM2-135M is calibrated and evaluated on the "
            "first 16 windows of 1024 tokens of WikiText-2 valid and test; the story models on windows of "
            "256 tokens of one half of TinyStories each."
        ),
        command="python experiments/core_protocol.py",
        entries=files("core-*.json"),
        body=accuracy.core_table,
        short=accuracy.core_short,
    ),
    Section(
        name="a3plus",
        title="a3+ against a3 and the baselines",
        what=(
            "Increase in perplexity of SmolLM2-135M, calibrated on 64 windows of 2048 tokens of WikiText-2 "
            "valid, on WikiText-2 test and on three texts of other domains. `balanced` spreads the budget "
            "by measured loss curves."
        ),
        command=f"{PROTOCOL} uniform|balanced|tasks --device cuda",
        entries=lambda: [*files("a3plus-uniform.json")(), *files("a3plus-balanced.json")()],
        body=a3plus.a3plus_table,
        short=a3plus.a3plus_short,
        pictures=figures.a3plus_pictures,
    ),
    Section(
        name="from-c4",
        title="Calibrated on another text",
        what="The same with calibration windows from C4: what overfits its calibration text shows here.",
        command=f"{PROTOCOL} from-c4 --device cuda",
        entries=files("a3plus-from-c4.json"),
        body=a3plus.from_c4_table,
    ),
    Section(
        name="own-words",
        title="Calibrated on the model's own words",
        what=(
            "Increase in perplexity of SmolLM2-135M when half of the calibration windows, or all, are text "
            "that the dense model has drawn from itself (`trisect sample`, docs/sample.md)."
        ),
        command=f"{PROTOCOL} own-words|own-words-alone --device cuda",
        entries=lambda: [
            entry
            for name in ("a3plus-own-words.json", "a3plus-own-words-alone.json", "own-words.json")
            for entry in files(name)()
        ],
        body=own_words.own_words_table,
        short=own_words.own_words_short,
        pictures=figures.own_words_pictures,
    ),
    Section(
        name="scopes",
        title="Who shares rotation frequencies",
        what=(
            "QK alone on SmolLM2-135M, the protocol of a3+: frequencies per key head, per layer, or one set "
            "for the whole model, which a stock checkpoint needs. Increase in perplexity, then perplexity "
            "by position in the context."
        ),
        command=f"{PROTOCOL} scopes --device cuda",
        entries=files("a3plus-scopes.json"),
        body=lambda: f"{a3plus.scopes_table()}\n\n{a3plus.position_table()}",
        short=a3plus.scopes_short,
    ),
    *(
        Section(
            name=f"tasks{ending}",
            title=f"Zero-shot tasks, calibrated on {text}",
            what=(
                f"SmolLM2-135M at 25%, calibrated on {text}, the first questions of each task, the same for "
                "all, through lm-eval; accuracy with its standard error."
            ),
            command=f"{PROTOCOL} tasks{ending} --device cuda --requests FILE; "
            "python experiments/device_tasks.py score",
            entries=partial(_tasks, f"tasks-smollm2-25{ending}", f"a3plus-tasks{ending}.json"),
            body=partial(accuracy.tasks_table, f"tasks-smollm2-25{ending}"),
            short=partial(accuracy.tasks_short, f"tasks-smollm2-25{ending}"),
        )
        for ending, text in CALIBRATED.items()
    ),
)
APPLICATIONS = (
    Section(
        name="quantise",
        title="Fewer bits",
        what=(
            "HQQ on dense and narrow models: bits per weight of the dense decoder, scales and zeros "
            "included, against perplexity. docs/quantize.md says what is counted."
        ),
        command="python experiments/quantise_pareto.py stories15m|smollm2",
        entries=lambda: [entry for s in quantise.STUDIES for entry in files(f"quantise-{s}/*.json")()],
        body=_quantise,
        pictures=_quantise_pictures,
        short=lambda: [
            "SmolLM2-135M is dequantised from 4 bits, so its dense weights lie on a grid already; how "
            "much that favours either side was not measured. Weights are dequantised for every call: "
            "what is saved is memory, not time."
        ],
    ),
    Section(
        name="quantise-kv",
        title="Fewer bits and a narrow KV cache",
        what=(
            "stories-mpt-20m in the form of the paper's table of MPT-30B: attention's weights and the KV "
            "cache in the same number of bits, the MLP whole. Factors are against the dense model in 16 "
            "bits."
        ),
        command="python experiments/quantise_stories_mpt.py",
        entries=files("quantise-stories-mpt/*.json"),
        body=quantise.kv_table,
    ),
    Section(
        name="finetune",
        title="Recovery by fine-tuning",
        what=(
            "LoRA on compressed models and, as a control, on dense ones. Held-out text is not the tuning "
            "text."
        ),
        command="python experiments/finetune_smollm2.py",
        entries=files("finetune-*.json"),
        body=_finetune,
        short=lambda: [
            "A dense row that gains as much as a narrow one says that tuning got used to the text: "
            "compare rows, not the two ends of one row. Steps are few, and settings were not searched."
        ],
    ),
    Section(
        name="export",
        title="Exports",
        what=(
            "Models compressed with `--portable`, run where trisect is not: stock transformers in a process "
            "that cannot import trisect, and llama.cpp."
        ),
        command="python experiments/export_smollm2.py stories15m|smollm2",
        entries=lambda: list(portable.exports().values()),
        body=portable.export_table,
        short=portable.export_short,
    ),
)
SECTIONS = (*ACCURACY, *APPLICATIONS, *MACHINES)
