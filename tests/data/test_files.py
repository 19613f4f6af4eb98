from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from explain._utils.errors import FolderError, OutputError, printable
from explain.data.files import Files, distinct, json_text, slug
from tests.conftest import in_threads


def filled(folder: Path, *, overwrite: bool = False) -> Files:
    files = Files(folder, overwrite=overwrite)
    files.add_picture("a.png", Image.new("RGB", (3, 2), "red"))
    files.add_array("a.npy", np.arange(3.0))
    files.add_json("a.json", {"label": "Käse"})
    return files


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    paths = filled(folder).write()
    assert paths == [folder / "a.png", folder / "a.npy", folder / "a.json"]
    assert set(folder.iterdir()) == set(paths)
    with Image.open(paths[0]) as picture:
        assert picture.size == (3, 2)
    assert np.load(paths[1]).tolist() == [0, 1, 2]
    assert json.loads(paths[2].read_text("utf-8")) == {"label": "Käse"}
    (tmp_path / "plain").write_text("")  # they are as open as other files
    assert {path.stat().st_mode for path in paths} == {(tmp_path / "plain").stat().st_mode}


def test_nothing_is_overwritten_without_leave_and_no_folder_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("precious")
    with pytest.raises(OutputError, match=r"a.npy' exists already"):
        filled(tmp_path).write()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.npy", "precious")]
    filled(tmp_path, overwrite=True).write()
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2]
    folder = tmp_path / "other"
    (folder / "a.json").mkdir(parents=True)
    with pytest.raises(OutputError, match="folder"):
        filled(folder, overwrite=True).write()
    assert list(folder.iterdir()) == [folder / "a.json"]


@pytest.mark.parametrize(
    ("number", "after", "message"),
    [(errno.ENOSPC, 2, "written"), (errno.EACCES, 0, "Permission")],
)
def test_a_failure_half_way_leaves_nothing_behind(
    number: int, after: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = iter(range(100))
    real = Path.open

    def fails(path: Path, *args: Any, **options: Any) -> Any:
        if next(opened) >= after:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(FolderError, match=message):
        filled(tmp_path).write()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="shorter") as caught:
        Files(tmp_path).add_json("x" * 300, {})
    assert not isinstance(caught.value, FolderError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("folder", "name"), [("a\0b", "c"), ("a", "b\0c")])
def test_a_path_with_nul_is_refused(folder: str, name: str, tmp_path: Path) -> None:
    files = Files(tmp_path / folder)
    files.add_json(name, {})
    with pytest.raises(OutputError, match="NUL"):
        files.write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_threads_that_save_to_the_same_names_the_files_are_of_one(
    overwrite: bool, tmp_path: Path
) -> None:
    """All find the names free before the first puts its files in place."""
    count = 6
    start = threading.Barrier(count)
    refusals: list[str] = []

    def save(number: int) -> None:
        files = Files(tmp_path, overwrite=overwrite)
        for name in sorted("abcdef", reverse=bool(number % 2)):
            files.add_json(f"{name}.json", number)
        start.wait()
        try:
            files.write()
        except OutputError as error:
            refusals.append(str(error))

    for _ in range(3):
        refusals.clear()
        in_threads(count, save)
        assert ["exists already" in refusal for refusal in refusals] == [True] * (
            0 if overwrite else count - 1
        )
        assert len({path.read_text("utf-8") for path in tmp_path.iterdir()}) == 1
        assert len(list(tmp_path.iterdir())) == 6
        for path in tmp_path.iterdir():
            path.unlink()


def test_planted_links_are_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (folder / ".explain-guessed.part").symlink_to(victim)
    with pytest.raises(FolderError, match="written"):
        filled(folder).write()
    monkeypatch.undo()
    (folder / "a.json").symlink_to(victim)
    filled(folder, overwrite=True).write()
    assert not (folder / "a.json").is_symlink()
    assert victim.read_text() == "precious"


def test_documents_stay_json_on_any_terminal() -> None:
    document = {"ab\x1b[2J\x9b\u2028\u202e": ["猫", "caf\udce9", "a\nb"]}
    for encoding in ("utf-8", "ascii", "latin-1"):
        text = json_text(document, encoding)
        assert json.loads(text.encode(encoding)) == document
        assert all(printable(line) == line for line in text.splitlines())
    assert "猫" in json_text(document)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("../a b/ä?.txt", "a-b-ä-.txt"),
        ("???", "image"),
        ("猫", "猫"),
        ("cafe\u0301", "café"),
    ],
)
def test_file_names_are_safe_and_keep_every_script(text: str, expected: str) -> None:
    assert slug(text) == expected
    assert len(slug(text * 100).encode()) <= 100


def test_names_are_told_apart_even_from_numbered_ones() -> None:
    assert distinct(["a", "a-2", "a", "A", "b"]) == ["a", "a-2", "a-3", "A-4", "b"]
