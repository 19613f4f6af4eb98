"""What runs survive: a kill at any time, dead and hanging workers, a full disk, a file that others
use."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import explain
from explain._utils.errors import RunError, quiet
from explain.store.sources import Content, Entry, Source
from tests.runs.networks import as_it_is, assert_same, explainer, folder_of, picture, stored_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, for speed")
LATE = 30.0  # seconds after which something never happens


def until(happened: Callable[[], Any], late: float = LATE) -> None:
    end = time.monotonic() + late
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def forked(work: Callable[[], None]) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work)
    with quiet():
        process.start()
    return process


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def rows(file: Path) -> int:
    try:
        return len(explain.open_run(file))
    except RunError:
        return 0


def slowly(image: Image.Image) -> torch.Tensor:
    time.sleep(0.02)
    return as_it_is(image)


def assert_sound(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_run_that_is_killed_at_any_time_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "photos", 16)
    file = tmp_path / "run.sqlite"
    model = explainer().model
    slow = explain.Explainer(model, preprocess=slowly)
    options: dict[str, Any] = {"methods": ["gradcam", "saliency"], "target": 1}

    def go() -> None:
        stored_run(tmp_path, folder, slow, workers=1, batch_size=3, **options)

    stored = 0
    for _ in range(2):
        process = forked(go)
        until(lambda: rows(file) > stored)  # noqa: B023
        workers = children(process.pid)
        assert len(workers) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        until(lambda: not any(map(is_there, workers)))  # noqa: B023
        assert_sound(file)
        (counts,) = explain.open_run(file).query(
            "SELECT DISTINCT count(*) FROM results GROUP BY photo"
        )
        assert counts == (2,)
        assert stored < rows(file) < 32
        stored = rows(file)
    run = stored_run(tmp_path, folder, slow, **options)
    assert (run.photos, len(run), run.ended) == (16, 32, True)
    assert_same(run, stored_run(tmp_path, folder, explainer(model), name="whole.sqlite", **options))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"photos", "run.sqlite", "whole.sqlite"}


class Trap(Source):
    """A few photos, some of which do something to the process that reads them."""

    kind = "trap"

    def __init__(self, **traps: Callable[[], Any]) -> None:
        self.traps = traps

    def entries(self) -> Iterator[Entry]:
        for name in ("a", "b", "c", "d"):
            yield Entry(name, ord(name))

    def read(self, entry: Entry) -> Content:
        self.traps.get(entry.name, int)()
        return Content(picture(entry.where))

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind}


def test_a_photo_that_hangs_its_decoder_is_given_up(tmp_path: Path) -> None:
    run = stored_run(tmp_path, Trap(b=lambda: time.sleep(60)), workers=1, timeout=0.5)
    assert run.failures["b"].startswith("image 'b' took longer than 0.5 s to be read")
    assert [row.name for row in run.rows()] == ["a", "c", "d"]


def test_a_worker_that_dies_costs_its_photo_only(tmp_path: Path) -> None:
    run = stored_run(tmp_path, Trap(c=lambda: os.kill(os.getpid(), signal.SIGKILL)), workers=2)
    assert list(run.failures) == ["c"]
    assert [row.name for row in run.rows()] == ["a", "b", "d"]
    assert stored_run(tmp_path, Trap(), workers=1).photos == 4


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """A caller who handles a signal, and still does so at the end of the block."""
    theirs = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, theirs)


def test_a_dead_worker_is_no_dead_child_of_the_callers(tmp_path: Path) -> None:
    """A process that has used a DataLoader handles SIGCHLD, and raises where a worker has died."""

    def raises(number: int, frame: Any) -> None:
        raise AssertionError("a worker of the caller's loader")

    trap = Trap(c=lambda: os.kill(os.getpid(), signal.SIGKILL))
    with handled(signal.SIGCHLD, raises):
        run = stored_run(tmp_path, trap, workers=1)
    assert list(run.failures) == ["c"]
    assert [row.name for row in run.rows()] == ["a", "b", "d"]


def test_an_interrupt_of_all_processes_is_for_the_first_alone(tmp_path: Path) -> None:
    """Ctrl-C reaches each process of a terminal: workers read on, until their parent ends them."""
    trap = Trap(b=lambda: os.kill(os.getpid(), signal.SIGINT))
    with handled(signal.SIGINT, signal.default_int_handler):
        run = stored_run(tmp_path, trap, workers=1)
    assert not run.failures
    assert [row.name for row in run.rows()] == ["a", "b", "c", "d"]


def test_a_source_that_breaks_off_is_told_and_what_came_before_is_kept(tmp_path: Path) -> None:
    class Broken(Trap):
        def entries(self) -> Iterator[Entry]:
            yield from list(super().entries())[:2]
            raise ConnectionError("the list ended early")

    for count in (0, 1):
        name = f"{count}.sqlite"
        with pytest.raises(ConnectionError, match="ended"):
            stored_run(tmp_path, Broken(), name=name, workers=count, batch_size=1)
        assert explain.open_run(tmp_path / name).photos in (1, 2)
        assert stored_run(tmp_path, Trap(), name=name).photos == 4


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file can grow beyond this: to SQLite it is the same as a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_run_and_loses_nothing_that_was_written(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "photos", 12, (64, 48))
    options: dict[str, Any] = {"methods": "saliency", "target": 1, "batch_size": 1}
    message = r"output .* cannot be written .*(disk|full)"
    with files_of_at_most(300_000), pytest.raises(RunError, match=message):
        stored_run(tmp_path, folder, **options)
    assert_sound(tmp_path / "run.sqlite")
    assert 0 < rows(tmp_path / "run.sqlite") < 12
    run = stored_run(tmp_path, folder, **options)
    assert_same(run, stored_run(tmp_path, folder, name="whole.sqlite", **options))
