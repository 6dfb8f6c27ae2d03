"""What `trisect doctor` finds: the folders trisect uses, the demo model, and one run of everything."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trisect.commands._checkup import NOTE, OK, PROBLEM, Finding
from trisect.errors import TrisectError

MB = 10**6
LITTLE = 2 * 10**9
"""Bytes of free disk: less does not hold a fetched model and what is made of it."""


def check_cache() -> Iterator[Finding]:
    """The folder that fetched models are kept in."""
    from trisect.data.registry import cache_folder
    from trisect.support.files import check_writable, existing_parent

    folder, fix = cache_folder(), "set TRISECT_CACHE to a folder that can be written"
    try:
        if folder.exists() and not folder.is_dir():
            raise TrisectError(f"{folder} is a file")
        check_writable(folder / "models")
    except TrisectError as error:
        yield Finding(subject="cache folder", state=PROBLEM, says=str(error), fix=fix)
        return
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    size = sum(path.stat().st_size for path in files)
    free = shutil.disk_usage(existing_parent(folder / "models")).free
    held = f"{size / MB:,.0f} MB in {len(files)} files" if folder.exists() else "made when it is needed"
    short = free < LITTLE
    yield Finding(
        subject="cache folder",
        state=NOTE if short else OK,
        says=f"{folder}: {held}, {free / 1e9:.1f} GB of disk free",
        fix="make room, or set TRISECT_CACHE to a larger disk" if short else "",
    )


def check_assets() -> Iterator[Finding]:
    """Local copies of datasets and task files; nothing needs them that can be fetched."""
    for name, holds in (("TRISECT_ASSETS", "data"), ("TRISECT_DATA", "")):
        chosen = os.environ.get(name)
        if not chosen:
            yield Finding(subject=name, state=OK, says="not set")
            continue
        folder = Path(chosen).expanduser() / holds
        there = folder.is_dir()
        yield Finding(
            subject=name,
            state=OK if there else PROBLEM,
            says=chosen if there else f"{chosen} has no folder {holds}" if holds else f"no folder {chosen}",
            fix="" if there else f"set {name} to the right folder, or unset it",
        )


def check_demo_model() -> Iterator[Finding]:
    """Models of the registry that were fetched before: whole, or not."""
    from trisect.data.registry import REGISTRY_MODELS, cache_folder, file_hash

    for name, record in REGISTRY_MODELS.items():
        path = cache_folder() / "models" / name / Path(record.member).name
        if not path.is_file():
            yield Finding(subject=name, state=NOTE, says="not fetched yet", fix="trisect demo fetches it")
        elif file_hash(path) == record.sha256:
            yield Finding(
                subject=name, state=OK, says=f"{path.stat().st_size / MB:.0f} MB, hash as published"
            )
        else:
            fix = f"remove {path}; it is fetched again when needed"
            yield Finding(subject=name, state=PROBLEM, says="its hash is not the published one", fix=fix)


def check_run(devices: list[str]) -> Iterator[Finding]:
    """A tiny random model, compressed with the default method on each kind of device."""
    for device in devices[:2]:
        subject = f"self-check on {device}"
        try:
            says = compress_tiny_model(device)
        # Whatever goes wrong here is what a user would meet in a real run; the table has to name it.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            fix = "run again with --verbose, and report what it says if the lines above are all ok"
            yield Finding(subject=subject, state=PROBLEM, says=reason, fix=fix)
        else:
            yield Finding(subject=subject, state=OK, says=says)


def compress_tiny_model(device: str) -> str:
    """What a whole compression of random weights came to; raises where it is not what was asked for."""
    import torch
    import transformers

    import trisect
    from trisect.models import shape_of
    from trisect.plan import budget_of

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval().to(device)
        ids = torch.randint(64, (8, 16))
    before = budget_of(shape_of(model)).linear_parameters
    model = trisect.compress(model, 0.5, calibration=ids)
    after = budget_of(shape_of(model)).linear_parameters
    with torch.no_grad():
        finite = bool(model(ids.to(device)).logits.isfinite().all())
    if not finite or after >= before:
        raise TrisectError(f"logits finite: {finite}; weights {before} before, {after} after")
    return f"a random model went from {before:,} to {after:,} decoder weights, its logits are finite"
