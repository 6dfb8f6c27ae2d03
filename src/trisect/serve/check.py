"""A model is compared with its folder's own log-probabilities before vLLM serves it.

An engine that computes something else prints fluent nonsense without a word. So the engine itself is asked, by the
way that requests take: a prompt through the paged cache, then a few tokens one by one.
"""

import json
import logging
import os
import time
from functools import wraps
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.models.looking import PROBE

log = logging.getLogger(__name__)

SWITCH = "TRISECT_SELF_CHECK"  # environment variable; 0 leaves the comparison out
TOLERANCE = {"float32": 0.001}
OTHER_TOLERANCE = 0.25  # mean difference of log-probabilities, in nats; the larger one where either side has 16 bits
LIMIT = 1 << 20  # bytes of a probe that are read


def check_engines() -> None:
    """Let every engine that vLLM starts in this process compare itself; other models are left alone."""
    from vllm.v1.engine.core import EngineCore

    start = EngineCore.__init__
    if hasattr(start, "__wrapped__"):
        return

    @wraps(start)
    def start_and_compare(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        compare(self)

    EngineCore.__init__ = start_and_compare


def compare(engine: Any) -> None:
    """Refuse to serve a compressed model whose log-probabilities are not those of its folder."""
    config = engine.vllm_config.model_config
    if not hasattr(config.hf_config, "trisect") or os.environ.get(SWITCH) == "0":
        return
    probe = read_probe(str(config.model), config.revision)
    tokens = 0 if probe is None else len(probe["prompt"]) + len(probe["answer"])
    if probe is None or tokens > config.max_model_len or engine.vllm_config.parallel_config.data_parallel_size > 1:
        log.warning("%s was not compared with its own log-probabilities: no usable %s.", config.model, PROBE)
        return
    found = answered(engine, probe)
    off = sum(abs(a - b) for a, b in zip(found, probe["logprobs"], strict=False)) / len(found)
    dtypes = (probe["dtype"], str(config.dtype).removeprefix("torch."))
    allowed = max(TOLERANCE.get(dtype, OTHER_TOLERANCE) for dtype in dtypes)
    if not off <= allowed:
        rounding = f"off by {off:.3g} on average, where {allowed:g} is rounding"
        wrong = f"log-probabilities of {len(found)} tokens are {rounding}"
        what = f"{config.model} does not compute in this engine what its {PROBE} says: {wrong}"
        raise TrisectError(f"{what}. Please report it; {SWITCH}=0 serves it all the same.")
    log.info("%s: log-probabilities of %d tokens agree with its %s to %.2g.", config.model, len(found), PROBE, off)


def read_probe(model: str, revision: str | None) -> dict[str, Any] | None:
    """The probe of a folder or a hub id; None where there is none, or none that can be used."""
    from transformers.utils import cached_file

    quiet = {name: False for name in ("gated", "missing_entries", "connection_errors")}
    path = cached_file(
        model, PROBE, revision=revision, **{f"_raise_exceptions_for_{name}": value for name, value in quiet.items()}
    )
    if path is None or Path(path).stat().st_size > LIMIT:
        return None
    probe = json.loads(Path(path).read_text(encoding="utf-8"))
    tokens, logprobs = [*probe["prompt"], *probe["answer"]], probe["logprobs"]
    numbers = all(isinstance(x, float) for x in logprobs) and all(isinstance(x, int) for x in tokens)
    return probe if numbers and len(logprobs) == len(tokens) - 1 else None


def answered(engine: Any, probe: dict[str, Any]) -> list[float]:
    """What the engine gives the prompt's tokens, and those of its answer as long as it is the probe's."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    asked = SamplingParams(
        temperature=0.0, max_tokens=len(probe["answer"]), ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    request = EngineCoreRequest(
        request_id="trisect-self-check",
        prompt_token_ids=probe["prompt"],
        mm_features=None,
        sampling_params=asked,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    engine.add_request(*engine.preprocess_add_request(request))
    found: list[float] = []
    tokens: list[int] = []
    while engine.scheduler.has_requests():
        stepped, _ = engine.step_fn()
        for output in (each for outputs in (stepped or {}).values() for each in outputs.outputs):
            if output.new_prompt_logprobs_tensors is not None:
                found += output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
            if output.new_logprobs is not None and tokens == probe["answer"][: len(tokens)]:
                found += [float(row[0]) for row in output.new_logprobs.logprobs]
            tokens += output.new_token_ids
    engine.reset_prefix_cache()
    return found
