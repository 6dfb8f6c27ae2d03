"""`trisect demo`: the whole flow on a small real model, in a few minutes on a laptop."""

from typing import TYPE_CHECKING, Annotated

import typer

from trisect.commands import _options as options
from trisect.commands import _screen as screen
from trisect.commands.compress import show_result

if TYPE_CHECKING:
    from trisect.models import Loaded

PANEL = "Start here"
EXAMPLES = (
    ("The whole flow on a small real model", "trisect demo"),
    ("The paper's method, and more removed", "trisect demo --method a3 --ratio 0.4"),
)
MODEL = "smollm2-135m"
PROMPT = "A function in Python is"
NEW_TOKENS = 40
# Enough that the moments settle, little enough that two cores finish within four minutes.
SAMPLES, LENGTH, EVAL_WINDOWS = 12, 512, 8


def run(
    ratio: Annotated[float, typer.Option(help="Fraction of the decoder's weights to remove.")] = 0.25,
    method: Annotated[str, typer.Option(metavar="NAME", help="See `trisect ls methods`.")] = "a3+",
    json: options.Json = None,
) -> None:
    """Fetch a small model, compress it, and show what it cost."""
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.data import REGISTRY_MODELS
    from trisect.data.catalogue import BUILTIN
    from trisect.methods import get_method
    from trisect.pipeline.job import Job, carry_out

    calibration = CalibrationConfig(source=BUILTIN, samples=SAMPLES, length=LENGTH)
    config = CompressConfig(ratio=ratio, method=method, calibration=calibration)
    get_method(method)
    screen.say(f"{MODEL}: remove {ratio:.0%} with {method}")
    with screen.quiet_libraries(), screen.progress() as report:
        report("load", 0, 1)
        loaded = screen.load(MODEL, options.LoadOptions(dtype="float32"))
        report("load", 1, 1)
        dense_text = continue_prompt(loaded)
        job = Job(
            model=loaded.model,
            source=MODEL,
            tokenizer=loaded.tokenizer,
            config=config,
            evaluate=None,
            eval_windows=EVAL_WINDOWS,
            other_text=False,
        )
        result = carry_out(job, say=screen.say, progress=report)
        narrow_text = continue_prompt(loaded)
    show_result(result)
    screen.say(f"({MODEL}: {REGISTRY_MODELS[MODEL].note})")
    screen.say(f"before:     {dense_text}", f"compressed: {narrow_text}")
    texts = {"prompt": PROMPT, "before": dense_text, "after": narrow_text}
    screen.keep_measurement(json, {**result.receipt, "texts": texts})
    screen.say_next(f"trisect compress {MODEL} -o small --ratio {ratio} --method {method}")


def continue_prompt(loaded: "Loaded") -> str:
    """The prompt and what the model makes of it, greedily, on one line."""
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    generated = loaded.model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return " ".join(loaded.tokenizer.decode(generated[0], skip_special_tokens=True).split())
