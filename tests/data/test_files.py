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
    paths = filled(tmp_path / "new" / "folder").write()
    assert [path.name for path in paths] == ["a.png", "a.npy", "a.json"]
    with Image.open(paths[0]) as picture:
        assert picture.size == (3, 2)
    assert np.load(paths[1]).tolist() == [0, 1, 2]
    assert json.loads(paths[2].read_text("utf-8")) == {"label": "Käse"}
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["a.json", "a.npy", "a.png"]


def test_nothing_is_overwritten_without_leave(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("precious")
    with pytest.raises(OutputError, match=r"a.npy' exists already"):
        filled(tmp_path).write()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.npy", "precious")]
    filled(tmp_path, overwrite=True).write()
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("number", "after", "message"),
    [(errno.ENOSPC, 0, "written"), (errno.ENOSPC, 2, "written"), (errno.EACCES, 0, "Permission")],
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
    files = Files(tmp_path)
    files.add_json("x" * 300, {})
    with pytest.raises(OutputError, match="shorter") as caught:
        files.write()
    assert not isinstance(caught.value, FolderError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_threads_that_save_to_the_same_names_the_files_are_of_one(
    overwrite: bool, tmp_path: Path
) -> None:
    """All find the names free before the first puts its files in place."""
    for _ in range(3):
        outcomes = together(tmp_path, overwrite=overwrite, count=6)
        expected = ["written"] * 6 if overwrite else [*["exists already"] * 5, "written"]
        assert sorted(outcomes.values()) == expected
        found = contents(tmp_path)
        assert len(found) == 6
        assert len({content["by"] for content in found.values()}) == 1
        for path in tmp_path.iterdir():
            path.unlink()


def together(folder: Path, *, overwrite: bool, count: int) -> dict[int, str]:
    """Write six files from several threads at once, in different orders; say what became of each
    thread's."""
    start = threading.Barrier(count)
    outcomes = {}

    def save(number: int) -> None:
        files = Files(folder, overwrite=overwrite)
        for name in sorted("abcdef", reverse=bool(number % 2)):
            files.add_json(f"{name}.json", {"by": number})
        start.wait()
        try:
            files.write()
            outcomes[number] = "written"
        except OutputError as error:
            outcomes[number] = "exists already" if "exists already" in str(error) else str(error)

    in_threads(count, save)
    return outcomes


def contents(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text("utf-8")) for path in folder.iterdir()}


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


def test_files_are_as_open_as_others(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    paths = filled(tmp_path).write()
    assert {path.stat().st_mode for path in paths} == {(tmp_path / "plain").stat().st_mode}


def test_documents_stay_json_on_any_terminal() -> None:
    document = {"ab\x1b[2J\x9b\u2028\u202e": ["猫", "caf\udce9", "a\nb"]}
    for encoding in ("utf-8", "ascii", "latin-1"):
        text = json_text(document, encoding)
        assert json.loads(text.encode(encoding)) == document
        assert all(printable(line) == line for line in text.splitlines())
    assert "猫" in json_text(document)


def test_a_folder_in_the_place_of_a_file_stops_everything(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OutputError, match="folder"):
        filled(tmp_path, overwrite=True).write()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("../a b/ä?.txt", "a-b-ä-.txt"),
        ("???", "image"),
        ("猫", "猫"),
        ("cafe\u0301", "café"),
        ("a_b-c", "a_b-c"),
    ],
)
def test_file_names_are_safe_and_keep_every_script(text: str, expected: str) -> None:
    assert slug(text) == expected
    assert len(slug(text * 100).encode()) <= 100


def test_names_are_told_apart_even_from_numbered_ones() -> None:
    assert distinct(["a", "a-2", "a", "A", "b"]) == ["a", "a-2", "a-3", "A-4", "b"]
