"""Alpaca's prompt, word for word as its authors published it."""

from trisect.data.instructions import Instruction

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def prompt_of(record: Instruction) -> str:
    """All that stands before the response."""
    if record.input:
        return WITH_INPUT.format(instruction=record.instruction, input=record.input)
    return WITHOUT_INPUT.format(instruction=record.instruction)
