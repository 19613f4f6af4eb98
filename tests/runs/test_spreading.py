"""A distributed run: pieces that are explained anywhere and in any order, without Ray, for which a class stands in."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import explain
from explain import ExplainError, ExplainWarning, LayerError, RunError
from explain.runs import State, open_run, run_on_ray
from explain.runs.cluster import PartExplainer, Report, Task
from explain.runs.sources import Content, Entry, Source
from explain.runs.storage import Storage
from tests.runs.networks import explainer, folder_of, picture

parquet: Any = pytest.importorskip("pyarrow.parquet", reason="an extra")
METHODS = ["gradcam", "saliency"]
Pieces = Iterator[list[Entry]]


class Cluster:
    """In place of Ray: takes each piece to a process that has got the task pickled, in an order of its own."""

    def __init__(self) -> None:
        self.pieces: list[list[str]] = []

    def init(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, ray: Any, actors: Any, gpus: float, task: Task, pieces: Pieces) -> Iterator[Report]:
        there = PartExplainer(pickle.loads(pickle.dumps(task)))
        sent = [pickle.dumps(piece) for piece in pieces]
        random.Random(0).shuffle(sent)
        for piece in sent:
            entries = pickle.loads(piece)
            self.pieces.append([entry.name for entry in entries])
            yield pickle.loads(pickle.dumps(self.report(there, entries)))

    def report(self, there: PartExplainer, entries: list[Entry]) -> Report:
        return there(entries)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Cluster]:
    """Have runs go to a cluster."""

    def put(cluster: Cluster) -> Cluster:
        monkeypatch.setattr("explain.runs.cluster._through", cluster)
        return cluster

    class Context:
        def __init__(self, *args: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *args: Any) -> None: ...

    monkeypatch.setattr("explain.runs.cluster._ray", lambda: None)
    monkeypatch.setattr("explain.runs.cluster._connected", Context)
    return put


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return list(parquet.read_table(folder).to_pylist())


def digests(run: explain.Run) -> list[tuple[Any, ...]]:
    """All results of a run with their digests, which are of every cell of the row and its photo, and of the map."""
    columns = "p.name, r.method, r.target, r.digest"
    return sorted(run.query(f"SELECT {columns} FROM results r JOIN photos p ON p.id = r.photo"))


def by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = {(row["name"], row["method"], row["target"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_rows_are_those_of_one_machine_to_the_last_digit(on: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 22)
    lines = [f"photos/{n:03}.png,{'abcde'[n % 5]},2,3,9,11" for n in range(22)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,x0,y0,x1,y1", *lines]))
    options: dict[str, Any] = {"metrics": ["pointinggame"], "batch_size": 4, "top_k": 2}
    made = explainer(categories=list("abcde"))
    local = explain.run(tmp_path / "list.csv", made, METHODS, output=tmp_path / "r.sqlite", workers=0, **options)
    states: list[State] = []
    cluster = on(Cluster())
    found = run_on_ray(
        tmp_path / "list.csv", made, METHODS, output=tmp_path / "maps", per_file=8, progress=states.append, **options
    )
    assert sorted(map(len, cluster.pieces)) == [6, 8, 8]
    local.export(tmp_path / "r.parquet")
    assert by_key(rows_in(tmp_path / "maps")) == by_key(rows_in(tmp_path / "r.parquet"))
    assert digests(found) == digests(local)
    assert (len(found), found.photos, found.ended, found.failures) == (88, 22, True, {})
    assert (states[-1].done, states[-1].total) == (22, 22)
    free = {"begun": None, "ended": None}
    assert {**found.manifest, **free} == {**local.manifest, **free}
    for query in ("name, class, options, style, paper, digest FROM methods", "name, stamp, label, digest FROM photos"):
        assert sorted(found.query(f"SELECT {query}")) == sorted(local.query(f"SELECT {query}"))
    assert found.insight("gradcam").lines(1)[0].endswith("44 maps of gradcam")


def test_a_run_goes_on_where_it_stopped(on: Any, tmp_path: Path) -> None:
    class Stopped(Cluster):
        def report(self, there: PartExplainer, entries: list[Entry]) -> Report:
            if len(self.pieces) == 3:
                raise KeyboardInterrupt
            return there(entries)

    folder_of(tmp_path / "photos", 20)
    on(Stopped())
    with pytest.raises(KeyboardInterrupt):
        run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps", per_file=4)
    with pytest.warns(ExplainWarning, match="2 new Parquet files"):
        before = open_run(tmp_path / "maps")
    assert (before.photos, before.ended) == (8, False)
    names = set(before.known)
    cluster = on(Cluster())
    states: list[State] = []
    found = run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps", per_file=5, progress=states.append)
    assert sorted(map(len, cluster.pieces)) == [2, 5, 5]
    assert not {name for piece in cluster.pieces for name in piece} & names
    assert len(by_key(rows_in(tmp_path / "maps"))) == found.photos == 20
    assert (found.ended, states[-1].there, states[-1].done) == (True, 8, 12)
    with pytest.raises(RunError, match="must be continued as it was begun, but its methods"):
        run_on_ray(tmp_path / "photos", explainer(), "saliency", output=tmp_path / "maps")


def test_a_piece_that_is_explained_twice_is_there_once(on: Any, tmp_path: Path) -> None:
    class Lossy(Cluster):
        def report(self, there: PartExplainer, entries: list[Entry]) -> Report:
            there(entries)  # and the actor is lost before it could tell
            return there(entries)

    folder_of(tmp_path / "photos", 6)
    on(Lossy())
    found = run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps", per_file=3)
    assert len(by_key(rows_in(tmp_path / "maps"))) == found.photos == 6


class Deadly(Source):
    """Photos of which one ends the process that reads it."""

    kind = "deadly"

    def entries(self) -> Iterator[Entry]:
        yield from (Entry(name) for name in "abcd")

    def read(self, entry: Entry) -> Content:
        if entry.name == "c":
            raise Death
        return Content(picture(ord(entry.name)))

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Death(BaseException):
    """Nothing in the process sees it, as when the system ends it."""


def test_a_photo_that_ends_each_process_costs_itself_only(on: Any, tmp_path: Path) -> None:
    deaths = []

    class Restarting(Cluster):
        def report(self, there: PartExplainer, entries: list[Entry]) -> Report:
            while True:
                try:
                    return there(entries)
                except Death:
                    deaths.append(entries)

    on(Restarting())
    found = run_on_ray(Deadly(), explainer(), output=tmp_path / "maps")
    assert len(deaths) == 3  # twice with the others, and once alone
    assert list(found.failures) == ["c"]
    assert found.failures["c"].startswith("image 'c' ended the process that explained it")
    assert found.photos == 3
    assert not list((tmp_path / "maps").glob("_begun*"))


def test_attempts_of_a_go_that_was_ended_do_not_count(on: Any, tmp_path: Path) -> None:
    class Ended(Cluster):
        def report(self, there: PartExplainer, entries: list[Entry]) -> Report:
            try:
                return there(entries)
            except Death:
                raise KeyboardInterrupt from None

    for _ in range(4):
        on(Ended())
        with pytest.raises(KeyboardInterrupt):
            run_on_ray(Deadly(), explainer(), output=tmp_path / "maps")
        (begun,) = (tmp_path / "maps").glob("_begun*")
        assert json.loads(begun.read_bytes()) == {"attempts": 1, "ended": [], "now": None}


def test_a_piece_that_does_not_come_back_is_no_end(on: Any, tmp_path: Path) -> None:
    class Losing(Cluster):
        def __call__(self, *args: Any) -> Iterator[Report]:
            yield from list(super().__call__(*args))[1:]

    folder_of(tmp_path / "photos", 6)
    on(Losing())
    with pytest.raises(RunError, match="pieces must all come back, but 2 photos did not; start once more"):
        run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps", per_file=2)
    with pytest.warns(ExplainWarning):
        assert not open_run(tmp_path / "maps").ended


def test_bad_photos_are_listed_and_tried_again(on: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 3)
    (tmp_path / "photos" / "bad.png").write_bytes(b"none")
    on(Cluster())
    found = run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps")
    assert (found.photos, list(found.failures), found.ended) == (3, ["bad.png"], True)
    picture(9).save(tmp_path / "photos" / "bad.png")
    cluster = on(Cluster())
    found = run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps")
    assert (cluster.pieces, found.photos, found.failures) == ([["bad.png"]], 4, {})


def test_what_holds_for_all_photos_is_raised_and_not_listed(on: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 3)
    on(Cluster())
    with pytest.raises(LayerError, match="nolayer"):
        run_on_ray(tmp_path / "photos", explainer(), layer="nolayer", output=tmp_path / "maps")
    assert not list((tmp_path / "maps").glob("*.parquet"))


def test_machines_that_do_not_share_the_folder_are_noticed(on: Any, tmp_path: Path) -> None:
    class Elsewhere(Cluster):
        def report(self, there: PartExplainer, entries: list[Entry]) -> Report:
            there.task.place.path = str(tmp_path)
            return there(entries)

    folder_of(tmp_path / "photos", 3)
    on(Elsewhere())
    with pytest.raises(RunError, match="must be a folder that all machines share, but 3 photos were written elsewhere"):
        run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps")


def test_machines_with_other_versions_are_refused(on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "photos", 3)
    on(Cluster())
    monkeypatch.setattr("explain.runs.cluster.versions", lambda: {"explain": "9", "torch": "9"})
    with pytest.raises(RunError, match=r"explain must have the same version on all machines, but it is .* and 9 on"):
        run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "all"}, "methods must be named to be run on several machines, got the group 'all'"),
        ({"actors": 0}, "actors must be a whole number from 1, got 0"),
        ({"gpus": -1}, "gpus must be a number from 0, got -1"),
        ({"per_file": True}, "per_file must be a whole number from 1, got True"),
        ({"workers": 2}, "actors says how many there are"),
        ({"source": []}, "source must have photos"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str, on: Any, tmp_path: Path) -> None:
    on(Cluster())
    given = {"source": [picture(0)], "explainer": explainer(), "output": tmp_path / "maps", **options}
    with pytest.raises(ExplainError, match=message):
        run_on_ray(given.pop("source"), **given)


def test_a_folder_that_holds_something_else_is_refused(on: Any, tmp_path: Path) -> None:
    on(Cluster())
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="must be a folder, got a file"):
        run_on_ray([picture(0)], explainer(), output=tmp_path / "file")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "x.parquet").write_text("")
    with pytest.raises(RunError, match="must be a new folder or that of a run, got one with other Parquet files"):
        run_on_ray([picture(0)], explainer(), output=tmp_path / "maps")
    with pytest.raises(RunError, match=r"_manifest.json"):
        open_run(tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.data", "s3fs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=r"ray must be installed"):
        run_on_ray([picture(0)], explainer(), output=tmp_path / "maps")
    with pytest.raises(RunError, match="s3fs"):
        Storage("s3://bucket/maps")


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Storage(tmp_path / "maps")
    place.write("a.json", b"1")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=r"output '.*maps' cannot be used: No space left on device"):
        place.write("a.json", b"2")
    monkeypatch.undo()
    assert (place.read("a.json"), list(place.stamps()), place.read("b.json")) == (b"1", ["a.json"], None)
    assert os.listdir(tmp_path / "maps") == ["a.json"]


def test_a_photo_in_two_files_is_noticed(on: Any, tmp_path: Path) -> None:
    on(Cluster())
    run_on_ray([picture(0)], explainer(), output=tmp_path / "maps")
    (file,) = (tmp_path / "maps").glob("*.parquet")
    (tmp_path / "maps" / "copy.parquet").write_bytes(file.read_bytes())
    with pytest.raises(RunError, match="'photo 0' is in two"):
        open_run(tmp_path / "maps")
    file.unlink()
    with pytest.warns(ExplainWarning):
        assert open_run(tmp_path / "maps").photos == 1


def test_a_folder_is_indexed_once_and_again_where_it_changed(on: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 4)
    on(Cluster())
    found = run_on_ray(tmp_path / "photos", explainer(), output=tmp_path / "maps", per_file=2)
    index, whole = tmp_path / "maps" / "_run.sqlite", digests(found)
    before = index.stat()
    assert digests(open_run(tmp_path / "maps")) == whole
    assert index.stat() == before  # nothing was new
    for damaged in (b"", b"no database" * 100):
        index.write_bytes(damaged)
        with pytest.warns(ExplainWarning, match="2 new"):
            assert digests(open_run(tmp_path / "maps")) == whole
    first = min((tmp_path / "maps").glob("*.parquet"))
    content = first.read_bytes()
    first.unlink()
    assert (open_run(tmp_path / "maps").photos, len(open_run(tmp_path / "maps"))) == (2, 2)
    first.write_bytes(content[:-100])
    with pytest.raises(RunError, match="cannot be read"):
        open_run(tmp_path / "maps")
    first.write_bytes(content)
    with pytest.warns(ExplainWarning, match="1 new"):
        assert digests(open_run(tmp_path / "maps")) == whole


def test_an_address_is_indexed_in_the_cache(on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder_of(tmp_path / "photos", 3)
    on(Cluster())
    address = f"memory://{tmp_path}/maps"
    found = run_on_ray(tmp_path / "photos", explainer(), METHODS, output=address, per_file=2)
    assert (found.photos, len(found), found.path.parent) == (3, 6, tmp_path / "cache" / "explain")
    picture(9).save(tmp_path / "photos" / "more.png")
    cluster = on(Cluster())
    assert len(run_on_ray(tmp_path / "photos", explainer(), METHODS, output=address)) == 8
    assert cluster.pieces == [["more.png"]]
    found.path.unlink()
    with pytest.warns(ExplainWarning, match="3 new"):
        run = open_run(address)
    written, failures = run.write_pictures("worst:2", tmp_path / "pictures")
    assert (len(written), failures) == (4, {})
    assert run.to_html(tmp_path / "page.html")[0].is_file()
    assert run.insight("gradcam").method == "gradcam"
