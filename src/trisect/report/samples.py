"""How the models go on from a prompt, greedily; one model in memory at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.report.records import Run, Sample

Load = Callable[[str], Any]
"""From a model's name to what `models.load_model` gives."""


def draw_samples(runs: Sequence[Run], prompts: Sequence[str], *, new_tokens: int, load: Load) -> list[Sample]:
    """The dense models first, where they are on this machine, then the runs."""
    columns: list[tuple[str, list[str]]] = []
    for source in dict.fromkeys(run.source for run in runs if run.source is not None):
        columns.append((f"{Path(source).name} (dense)", _of_source(source, prompts, new_tokens, load)))
    for run in runs:
        columns.append((run.name, continue_prompts(load(str(run.folder)), prompts, new_tokens)))
    return [
        Sample(prompt=prompt, texts=tuple((name, texts[number]) for name, texts in columns))
        for number, prompt in enumerate(prompts)
    ]


def check_samples(prompts: Sequence[str], new_tokens: int) -> None:
    """Refuse, before any model is loaded, what cannot be continued."""
    if not all(prompts):
        raise TrisectError('A prompt is empty; give some words, e.g. --sample "Once upon a time".')
    if new_tokens < 1:
        raise TrisectError(f"--sample-tokens must be 1 or more, not {new_tokens}.")


def _of_source(source: str, prompts: Sequence[str], new_tokens: int, load: Load) -> list[str]:
    """A receipt may name any model: only what is here already is loaded, nothing is fetched for its sake."""
    from trisect.data.registry import REGISTRY_MODELS

    if source not in REGISTRY_MODELS and not Path(source).exists():
        return [f"(not sampled: {source} is not on this machine)"] * len(prompts)
    return continue_prompts(load(source), prompts, new_tokens)


def continue_prompts(loaded: Any, prompts: Sequence[str], new_tokens: int) -> list[str]:
    """What the model writes after each prompt, greedily."""
    import torch

    if loaded.tokenizer is None:
        raise TrisectError(f"{loaded.name} has no tokenizer, so it cannot read a prompt; leave --sample out.")
    texts = []
    for prompt in prompts:
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids.to(loaded.model.device)
        with torch.no_grad():
            settings = {"do_sample": False, "num_beams": 1, "pad_token_id": loaded.tokenizer.eos_token_id}
            made = loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings
            )
        # The first new word by itself would lose the space in front of it.
        read, whole = (loaded.tokenizer.decode(each[0], skip_special_tokens=True) for each in (ids, made))
        texts.append(whole.removeprefix(read))
    return texts
