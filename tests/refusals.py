"""Bad input as people type it: each is refused in one line with code 2 before any weight is read.

`prepared` makes the files that the command lines name, in the current folder. tests/test_refusals.py runs all of
them; experiments/refusals.py times each as a process and writes docs/refusals.md.
"""

import os
from pathlib import Path

import transformers

from tiny_models import LLAMA, character_tokenizer

CUT = "--ratio 0.25 --calibration text.txt"
REFUSED = {
    "models": [
        f"compress nowhere -o out {CUT}",
        f"compress ./nowhere -o out {CUT}",
        f"compress a/b/c -o out {CUT}",
        f"compress text.txt -o out {CUT}",
        f"compress empty -o out {CUT}",
        f"compress pickled -o out {CUT}",
        f"compress broken -o out {CUT}",
        f"compress strange -o out {CUT}",
        f"compress encoder -o out {CUT}",
        f"compress headless.gguf -o out {CUT}",
        f"compress incomplete -o out {CUT}",
        "inspect nowhere",
        "eval nowhere",
        "quantize nowhere -o out",
        "finetune nowhere --data text.txt -o out",
        "bench nowhere",
        "export nowhere -o out",
        "report nowhere",
        "report model",
    ],
    "outputs": [
        f"compress model {CUT}",
        f"compress model -o text.txt {CUT}",
        f"compress model -o full {CUT}",
        f"compress model -o text.txt/out {CUT}",
        f"compress model -o out {CUT} --json text.txt/m.json",
        "quantize model -o full",
        "finetune model --data text.txt -o full",
        "init compress -o text.txt",
        "report model -o page.pdf",
    ],
    "goals": [
        "compress model -o out",
        "compress model -o out --ratio 1.5",
        "compress model -o out --ratio 125%",
        "compress model -o out --ratio a-quarter",
        "compress model -o out --ratio 0.25 --kv-ratio 0.5",
        "compress model -o out --target-params lots",
        "compress model -o out --target-params 1T",
        "compress model -o out --target-kv-bytes 1",
        "compress model -o out --max-ppl-increase much",
        "compress model -o out --ratio 0.25 --budget latency",
        "compress model -o out --ratio 0.25 --budget money",
        "compress model -o out --ratio 0.999",
        "compress model -o out --ratio 0.25 --layers 7-9",
        "compress model -o out --ratio 0.25 --layers 3-1",
        "compress model -o out --ratio 0.25 --parts qv",
        "compress model -o out --kv-ratio 0.25 --parts mlp",
        "compress model -o out --ratio 0.25 --align 5",
        "compress model -o out --ratio 0.25 --floor 2",
    ],
    "methods": [
        f"compress model -o out {CUT} --method a4",
        f"compress model -o out {CUT} --fast --best",
        f"compress model -o out {CUT} --fast --method svd",
        f"compress model -o out {CUT} --portable --method a3",
        f"compress model -o out {CUT} --without folds",
        f"compress model -o out {CUT} --allocate evenly",
    ],
    "texts": [
        "compress model -o out --ratio 0.25 --calibration nofile.txt",
        "compress model -o out --ratio 0.25 --calibration wikitxt2",
        "compress model -o out --ratio 0.25 --calibration empty",
        "compress model -o out --ratio 0.25 --calibration text.txt:0",
        f"compress model -o out {CUT} --eval nofile.txt",
        "compress model -o out --ratio 0.25 --moments nofile.safetensors",
        "eval model --data nofile.txt",
        "finetune model --data nofile.json -o out",
        "finetune model --data text.txt --eval-data nofile.txt -o out",
        "eval model --limit 3",
        "compare nofile.yaml",
        "compress --config nofile.yaml",
    ],
    "the machine": [
        f"compress model -o out {CUT} --device cuda:7",
        f"compress model -o out {CUT} --device gpu",
        f"compress model -o out {CUT} --device meta",
        f"compress model -o out {CUT} --dtype float8",
        f"compress model -o out {CUT} --stream maybe",
        "eval model --device cuda:7",
        "bench model --graphs",
        "bench model --length 0",
    ],
    "numbers": [
        f"compress model -o out {CUT} --length 4096",
        f"compress model -o out {CUT} --length 1",
        f"compress model -o out {CUT} --samples 0",
        f"compress model -o out {CUT} --samples many",
        f"compress model -o out {CUT} --seed -1",
        "quantize model -o out --bits 5",
        "quantize model -o out --group-size 7",
        "finetune model --data text.txt -o out --rank 0",
        "finetune model --data text.txt -o out --save-every 0",
        "sample model -o out.jsonl --temperature 0",
    ],
    "words": [
        "compres model",
        "compress model -o out --rato 0.25",
        "ls everything",
        "init compres",
        "inspect",
        "compress model model -o out --ratio 0.25",
    ],
}
"""What it is about -> command lines."""
LINES = [line for lines in REFUSED.values() for line in lines]


def prepared() -> None:
    """The files that the lines name, where we are."""
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    Path("text.txt").write_text("A text for people to read. " * 200)
    for folder in ("empty", "full", "pickled", "broken", "strange", "encoder", "incomplete"):
        Path(folder).mkdir()
    Path("full/notes.txt").write_text("mine")
    settings = Path("model/config.json").read_text()
    Path("pickled/config.json").write_text(settings)
    Path("pickled/pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    Path("broken/config.json").write_text("{")
    Path("strange/config.json").write_text('{"model_type": "perceiver_io"}')
    Path("encoder/config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    Path("headless.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    Path("incomplete/config.json").write_text(settings)
    os.environ["HF_HUB_OFFLINE"] = "1"
