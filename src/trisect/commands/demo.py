"""`trisect demo`: the whole flow on a small real model, in a few minutes on a laptop."""

from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Json, LoadOptions, option
from trisect.commands.compress import show_result

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
    ratio: Annotated[float, option("Fraction of the decoder's weights to remove.")] = 0.25,
    method: Annotated[str, option("See `trisect ls methods`.", "NAME")] = "a3+",
    json: Json = None,
) -> None:
    """Fetch a small model, compress it, and show what it cost."""
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.data import REGISTRY_MODELS
    from trisect.data.catalogue import BUILTIN
    from trisect.methods import get_method
    from trisect.pipeline.job import Job, carry_out
    from trisect.report.page import continue_prompts

    calibration = CalibrationConfig(source=BUILTIN, samples=SAMPLES, length=LENGTH)
    config = CompressConfig(ratio=ratio, method=method, calibration=calibration)
    get_method(method)

    def continued(loaded: Any) -> str:
        return " ".join((PROMPT + continue_prompts(loaded, [PROMPT], NEW_TOKENS)[0]).split())

    screen.say(f"{MODEL}: remove {ratio:.0%} with {method}")
    with screen.quiet_libraries(), screen.progress() as report:
        report("load", 0, 1)
        loaded = screen.load(MODEL, LoadOptions(dtype="float32"))
        report("load", 1, 1)
        dense_text = continued(loaded)
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
        narrow_text = continued(loaded)
    show_result(result)
    screen.say(f"({MODEL}: {REGISTRY_MODELS[MODEL].note})")
    screen.say(f"before:     {dense_text}", f"compressed: {narrow_text}")
    texts = {"prompt": PROMPT, "before": dense_text, "after": narrow_text}
    screen.keep_measurement(json, {**result.receipt, "texts": texts})
    screen.say_next(f"trisect compress {MODEL} -o small --ratio {ratio} --method {method}")
