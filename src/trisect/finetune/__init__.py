"""Recovery fine-tuning: LoRA adapters on a compressed model, merged into its narrow weights."""

from trisect.config.verbs import TuneConfig
from trisect.finetune.examples import Example, Examples, instruction_examples, load_examples
from trisect.finetune.training import finetune
