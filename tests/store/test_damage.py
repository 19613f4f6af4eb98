"""A run file that is damaged gives what was stored, or one line that says so; never other maps."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import explain
from explain import ExplainError
from explain._utils.errors import RunError
from tests.fuzz.damage import KINDS, check
from tests.runs.networks import explainer, picture, stored_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    photos = [(picture(number), number % 5) for number in range(6)]
    network = explainer(categories=list("abcde"))
    options: Any = {"methods": ["gradcam", "saliency"], "metrics": ["sparseness"]}
    return stored_run(tmp_path_factory.mktemp("whole"), photos, network, **options).path


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_no_corruption_of_the_file_gives_other_maps_unseen(
    kind: int, whole: Path, tmp_path: Path
) -> None:
    seeds = range(kind, 36, len(KINDS))
    assert "refused" in {check(whole, tmp_path / "damaged.sqlite", seed) for seed in seeds}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE results SET map = zeroblob(length(map)) WHERE id = 2",
        "UPDATE results SET map = 'text' WHERE id = 2",
        "UPDATE results SET map = x'00' WHERE id = 2",
        "UPDATE results SET scale = scale * 2 WHERE id = 2",
        "UPDATE results SET score = score + 1 WHERE id = 2",
        "UPDATE results SET score = 'many' WHERE id = 2",
        "UPDATE results SET shape = '[' WHERE id = 2",
        "UPDATE results SET photo = 99 WHERE id = 2",
        "UPDATE results SET layer = '[1' WHERE id = 1",
        "UPDATE photos SET prediction = 'cat' WHERE id = 2",
        "UPDATE photos SET label_probability = 0 WHERE id = 2",
        "UPDATE photos SET boxes = '{' WHERE id = 2",
        "UPDATE photos SET name = x'ff' WHERE id = 2",
        "UPDATE results SET metrics = '{}' WHERE id = 2",
        "UPDATE methods SET style = 'contour' WHERE name = 'gradcam'",
        "DELETE FROM results WHERE id = 2",
        "DELETE FROM methods WHERE name = 'gradcam'",
        "DELETE FROM photos WHERE id = 2",
        "UPDATE photos SET id = 99 WHERE id = 2",
    ],
)
def test_damaged_cells_raise_one_clear_error(statement: str, whole: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(whole, tmp_path / "run.sqlite"))
    with sqlite3.connect(file) as db:
        db.execute(statement)
    db.close()
    with pytest.raises(ExplainError, match="run"):
        list(explain.open_run(file).rows())


@pytest.mark.parametrize("rest", ["there", "gone"])
def test_a_run_that_was_interrupted_is_not_read_without_what_lies_beside_it(
    rest: str, whole: Path, tmp_path: Path
) -> None:
    """Where SQLite may not write, as on a drive that is read-only, it cannot read that part."""
    (tmp_path / "work").mkdir()
    (tmp_path / "read").mkdir()
    work = Path(shutil.copy(whole, tmp_path / "work" / "run.sqlite"))
    file = tmp_path / "read" / "run.sqlite"
    with closing(sqlite3.connect(work)) as db:
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("DELETE FROM manifest WHERE key = 'ended'")
        db.commit()
        shutil.copy(work, file)
        shutil.copy(f"{work}-wal", f"{file}-wal")
    # where this is, SQLite can make no file of its own, as in such a folder
    Path(f"{file}-shm").symlink_to("nowhere")
    if rest == "gone":
        Path(f"{file}-wal").write_bytes(b"")
        assert len(explain.open_run(file)) == 12
        return
    with pytest.raises(RunError, match="interrupted"):
        explain.open_run(file)
    Path(f"{file}-shm").unlink()
    assert not explain.open_run(file).ended
