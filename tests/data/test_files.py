from __future__ import annotations

import errno
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from explain._utils.errors import FolderError, OutputError, printable
from explain.data.files import Files, distinct, json_text, locked, slug


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


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0) -> None:
    """Let a function of ``os`` fail on files, from a call on: rather than chmod, which does not stop root."""
    function, calls = getattr(os, name), iter(range(1000))

    def fails(path: Any, *args: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *args, **options)

    monkeypatch.setattr(os, name, fails)


@pytest.mark.parametrize("after", [0, 2])
def test_a_failure_half_way_leaves_nothing_behind(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "open", errno.ENOSPC, after)
    with pytest.raises(FolderError, match="written"):
        filled(tmp_path).write()
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_file_system_is_what_the_message_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "open", errno.EROFS)
    failing(monkeypatch, "unlink", errno.EROFS)  # there, even of what does not exist
    with pytest.raises(FolderError, match="Read-only"):
        filled(tmp_path).write()


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        filled(tmp_path / "file").write()


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "open", errno.EACCES)
    with pytest.raises(FolderError, match="Permission"):
        filled(tmp_path).write()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.add_json("x" * 300, {})
    with pytest.raises(OutputError, match="shorter") as caught:
        files.write()
    assert not isinstance(caught.value, FolderError)
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_save_to_the_same_names_one_is_refused_and_the_others_files_are_whole(tmp_path: Path) -> None:
    """The second comes while the first puts its files in place; both found the names free before."""
    outcomes = together(tmp_path, overwrite=False, count=8)
    assert sorted(outcomes.values()) == ["exists already"] * 7 + ["written"]
    winner = next(i for i, outcome in outcomes.items() if outcome == "written")
    assert contents(tmp_path) == {f"{name}.json": {"by": winner} for name in "abcdef"}


def test_of_two_that_overwrite_the_same_names_the_files_are_of_one(tmp_path: Path) -> None:
    for _ in range(5):
        assert set(together(tmp_path, overwrite=True, count=6).values()) == {"written"}
        found = contents(tmp_path)
        assert len(found) == 6
        assert len({content["by"] for content in found.values()}) == 1


def together(folder: Path, *, overwrite: bool, count: int) -> dict[int, str]:
    """Write six files from several threads at once, in different orders; say what became of each thread's."""
    start, outcomes = threading.Barrier(count), {}

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

    threads = [threading.Thread(target=save, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def contents(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text("utf-8")) for path in folder.iterdir()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning")  # what it forks, writes files
@pytest.mark.parametrize("overwrite", [False, True])
def test_processes_that_save_to_the_same_names_do_not_mix_either(overwrite: bool, tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            os.close(theirs)
            os.read(ours, 1)  # returns when the parent lets all of them go
            files = Files(tmp_path, overwrite=overwrite)
            for name in "abcdef":
                files.add_json(f"{name}.json", {"by": number})
            try:
                files.write()
            except OutputError:
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(theirs)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(ours)
    assert sorted(codes) == ([0] * 4 if overwrite else [0, 1, 1, 1])
    found = contents(tmp_path)
    assert len(found) == 6
    assert len({content["by"] for content in found.values()}) == 1


def test_what_another_program_puts_there_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no lock, and is quicker than the second of our files."""
    link = os.link

    def late(part: Path, path: Path) -> None:
        if path.name == "a.npy":
            path.write_text("theirs")
        link(part, path)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(OutputError, match=r"a\.npy' exists already"):
        filled(tmp_path).write()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.npy", "theirs")]


def test_a_file_system_without_hard_links_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", errno.EPERM)
    assert json.loads(filled(tmp_path).write()[2].read_text("utf-8")) == {"label": "Käse"}
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(OutputError, match="exists already"):
        filled(tmp_path).write()


def test_a_folder_that_another_keeps_locked_is_waited_for_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explain.data.files.PATIENCE", 0.05)
    with locked(tmp_path), pytest.raises(FolderError, match="program"):
        filled(tmp_path).write()
    assert list(tmp_path.iterdir()) == []
    assert len(filled(tmp_path).write()) == 3


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


def test_names_of_parts_cannot_be_guessed_and_files_are_as_open_as_others(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    paths = filled(tmp_path).write()
    assert {path.stat().st_mode for path in paths} == {(tmp_path / "plain").stat().st_mode}
    seen: list[str] = []

    class Watched(Files):
        def _place(self, parts: list[Path], paths: list[Path]) -> None:
            seen.extend(part.name for part in parts)
            super()._place(parts, paths)

    files = Watched(tmp_path / "new")
    files.add_json("a.json", {})
    files.add_json("b.json", {})
    files.write()
    assert len({re.fullmatch(r"\.explain-([0-9a-f]{16})\.part", name)[1] for name in seen}) == 2  # type: ignore[index]


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


def test_one_name_cannot_be_given_twice() -> None:
    files = filled(Path())
    with pytest.raises(OutputError, match="written"):
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
