"""Output is whole or not there."""

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trisect.errors import TrisectError
from trisect.support import files


def test_a_new_folder_appears_only_when_it_is_done(tmp_path: Path):
    out = tmp_path / "deep" / "out"
    with files.new_folder(out) as partial:
        (partial / "weights").write_text("1")
        (partial / "sub").mkdir()
        (partial / "sub" / "config").write_text("2")
        assert not out.exists()
    assert (out / "sub" / "config").read_text() == "2"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error):
    def fail(partial: Path) -> None:
        (partial / "weights").write_text("half")
        raise error

    with pytest.raises(error), files.new_folder(tmp_path / "out") as partial:
        fail(partial)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(TrisectError, match="not empty"), files.new_folder(tmp_path):
        pytest.fail("the body must not run")
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_empty_folder_may_be_filled(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    with files.new_folder(out) as partial:
        (partial / "a").write_text("1")
    assert (out / "a").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path):
    (tmp_path / "out").write_text("")
    with pytest.raises(TrisectError, match="is a file"):
        files.check_new_folder(tmp_path / "out")
    with pytest.raises(TrisectError, match="is a file, not a folder"):
        files.check_new_folder(tmp_path / "out" / "deeper")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_is_not_writable_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(TrisectError, match="not writable"):
        files.check_new_folder(tmp_path / "out")


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(TrisectError, match="disk is full"), files.new_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_keep_their_name(tmp_path: Path):
    with pytest.raises(FileNotFoundError), files.new_folder(tmp_path / "out"):
        (tmp_path / "absent").read_text()


def test_an_atomic_write_replaces_the_whole_file(tmp_path: Path):
    path = tmp_path / "a.txt"
    files.atomic_write_text(path, "old and long")
    files.atomic_write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def refuse(source, target):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        files.atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_files_get_the_users_usual_permissions(tmp_path: Path):
    files.atomic_write_text(tmp_path / "a", "1")
    (tmp_path / "b").write_text("1")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_private_files_inside_a_folder_become_usual_ones(tmp_path: Path):
    (tmp_path / "usual").write_text("1")
    with files.new_folder(tmp_path / "out") as partial:
        (partial / "weights").touch(mode=0o600)
    found = (tmp_path / "out" / "weights").stat().st_mode
    assert found == (tmp_path / "usual").stat().st_mode


def test_json_holds_no_numbers_that_json_does_not_know(tmp_path: Path):
    files.write_json(tmp_path / "a.json", {"a": math.inf, "b": (1.5, math.nan), "c": {"d": "x"}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None, "b": [1.5, None], "c": {"d": "x"}}


def test_too_little_space_is_refused(tmp_path: Path):
    files.check_disk_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(TrisectError, match="GB are free"):
        files.check_disk_space(tmp_path, 1 << 70)


def test_small_sizes_are_told_in_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_243_000))
    with pytest.raises(TrisectError, match=r"needs 27\.4 MB, but only 5\.2 MB are free"):
        files.check_disk_space(tmp_path, 27_410_000)
