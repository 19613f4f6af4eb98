from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from explain.errors import OutputError
from explain.output import Files, distinct, slug


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


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full_disk(path: Path, *args: object, **options: object) -> object:
        if path.name.startswith(".a.json"):
            raise OSError(28, "No space left on device")
        return opened(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", full_disk)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        filled(tmp_path).write()
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        filled(tmp_path / "file").write()


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)  # rather than chmod, which does not stop root
    with pytest.raises(OutputError, match="cannot be written: Permission denied; choose another"):
        filled(tmp_path).write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_stops_everything(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OutputError, match=r"a.json' must be a file, but a folder is in its place"):
        filled(tmp_path, overwrite=True).write()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_one_name_cannot_be_given_twice() -> None:
    files = filled(Path())
    with pytest.raises(OutputError, match=r"'a\.png' would be written twice"):
        files.add_picture("a.png", Image.new("RGB", (1, 1)))


def test_records_are_strict_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Files(Path()).add_json("a.json", {"x": float("nan")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("../a b/ä?.txt", "a-b-ä-.txt"), ("???", "image"), ("猫", "猫"), ("cafe\u0301", "café"), ("a_b-c", "a_b-c")],
)
def test_file_names_are_safe_and_keep_every_script(text: str, expected: str) -> None:
    assert slug(text) == expected
    assert len(slug(text * 100).encode()) <= 100


def test_names_are_told_apart_even_from_numbered_ones() -> None:
    assert distinct(["a", "a-2", "a", "A", "b"]) == ["a", "a-2", "a-3", "A-4", "b"]
