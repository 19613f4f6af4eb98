"""A distributed run: pieces that are explained anywhere and in any order, without Ray, for which a
class stands in."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import explain
from explain import ExplainWarning, LayerError, RunError, open_run
from explain.runs import Content, Entry, Source, run_on_ray
from explain.runs.cluster import PartExplainer, Report, explain_in_pieces
from explain.runs.job import Job
from explain.runs.parts import Storage
from explain.runs.runner import State
from tests.fuzz.damage import damaged
from tests.runs.networks import explainer, folder_of, picture, stored_run

parquet: Any = pytest.importorskip("pyarrow.parquet", reason="an extra")
METHODS = ["gradcam", "saliency"]


class Death(BaseException):
    """Nothing in the process sees it, as when the system ends it."""


class Cluster:
    """In place of Ray: takes each piece to a process that has got the job pickled; the last piece
    comes back first. Something may interfere with each piece."""

    def __init__(self, interfere: Callable[[Cluster], object] = id) -> None:
        self.interfere = interfere
        self.pieces: list[list[str]] = []
        self.sent: list[bytes] = []

    def joined(self, job: Job, folder: Storage) -> Cluster:
        self.there = PartExplainer(*pickle.loads(pickle.dumps((job, folder))))
        return self

    def are_busy(self) -> bool:
        return len(self.sent) == 2

    def send(self, piece: list[Entry]) -> None:
        self.sent.append(pickle.dumps(piece))

    def receive(self) -> tuple[list[Entry], Report | None] | None:
        if not self.sent:
            return None
        piece = pickle.loads(self.sent.pop())
        self.pieces.append([entry.name for entry in piece])
        self.interfere(self)
        try:
            return piece, pickle.loads(pickle.dumps(self.there.report(piece)))
        except Death:
            return piece, None


def spread(
    source: Any,
    output: Any,
    methods: Any = "gradcam",
    cluster: Cluster | None = None,
    *,
    model_explainer: Any = None,
    metrics: Any = (),
    per_file: int = 64,
    progress: Any = None,
    **options: Any,
) -> explain.Run:
    job = Job(source, model_explainer or explainer(), methods, None, metrics, **options)
    folder = Storage(output)
    explain_in_pieces(
        job, folder, lambda: (cluster or Cluster()).joined(job, folder), per_file, progress
    )
    return open_run(output)


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    """The folder of a run of six photos in pieces of two."""
    spread(folder_of(tmp_path / "photos", 6), tmp_path / "maps", per_file=2)
    return tmp_path / "maps"


def digests(run: explain.Run) -> list[tuple[Any, ...]]:
    """All results of a run with their digests, which are of every cell of the row and its photo,
    and of the map."""
    columns = "p.name, r.method, r.target, r.digest"
    return sorted(run.query(f"SELECT {columns} FROM results r JOIN photos p ON p.id = r.photo"))


def by_key(file: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = parquet.read_table(file).to_pylist()
    by_name = {(row["name"], row["method"], row["target"]): row for row in rows}
    assert len(by_name) == len(rows)
    return by_name


def test_rows_are_those_of_one_machine_to_the_last_digit(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 10)
    lines = [f"photos/{n:03}.png,{'abcde'[n % 5]},2,3,9,11" for n in range(10)]
    source = tmp_path / "list.csv"
    source.write_text("\n".join(["path,label,x0,y0,x1,y1", *lines]))
    options: dict[str, Any] = {"metrics": ["pointinggame"], "batch_size": 4, "top_k": 2}
    network = explainer(categories=list("abcde"))
    local = stored_run(tmp_path, source, network, METHODS, **options)
    local.export(tmp_path / "r.parquet")
    options.update(model_explainer=network, per_file=4)
    cluster = Cluster()
    states: list[State] = []
    maps = tmp_path / "maps"
    run = spread(source, maps, METHODS, cluster, progress=states.append, **options)
    assert sorted(map(len, cluster.pieces)) == [2, 4, 4]
    assert by_key(maps) == by_key(tmp_path / "r.parquet")
    assert digests(run) == digests(local)
    assert (len(run), run.photos, run.ended, run.failures) == (40, 10, True, {})
    assert (states[-1].done, states[-1].total) == (10, 10)
    free = {"begun": None, "ended": None}
    assert {**run.manifest, **free} == {**local.manifest, **free}
    for query in ("name, class, options, style, paper FROM methods", "stamp, digest FROM photos"):
        assert sorted(run.query(f"SELECT {query}")) == sorted(local.query(f"SELECT {query}"))
    assert run.insight("gradcam").lines(1)[0].endswith("20 maps of gradcam")


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def stop(cluster: Cluster) -> None:
        if len(cluster.pieces) == 3:
            raise KeyboardInterrupt

    photos = folder_of(tmp_path / "photos", 10)
    maps = tmp_path / "maps"
    with pytest.raises(KeyboardInterrupt):
        spread(photos, maps, cluster=Cluster(stop), per_file=2)
    stopped = open_run(maps)
    assert (stopped.photos, stopped.ended) == (4, False)
    cluster = Cluster()
    states: list[State] = []
    run = spread(photos, maps, cluster=cluster, per_file=5, progress=states.append)
    assert sorted(map(len, cluster.pieces)) == [1, 5]
    assert len(by_key(maps)) == run.photos == 10
    assert (run.ended, states[-1].there, states[-1].done) == (True, 4, 6)
    with pytest.raises(RunError, match=r"methods, gradcam: GradCAM.* before, none now"):
        spread(photos, maps, "saliency")


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


def test_a_photo_that_ends_each_process_costs_itself_only(tmp_path: Path) -> None:
    cluster = Cluster()
    run = spread(Deadly(), tmp_path / "maps", cluster=cluster)
    deaths = [len(piece) for piece in cluster.pieces if "c" in piece]
    assert deaths == [4, 4, 1, 1]  # twice with the others, and twice alone
    assert (list(run.failures), run.photos) == (["c"], 3)
    assert run.failures["c"].startswith("image 'c' ended the process that explained it")


def test_errors_of_all_photos_and_machines_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(cluster: Cluster) -> None:
        cluster.there.folder.path = str(tmp_path)

    photos = folder_of(tmp_path / "photos", 3)
    with pytest.raises(LayerError, match="nolayer"):
        spread(photos, tmp_path / "layer", layer="nolayer")
    assert not list((tmp_path / "layer").glob("*.parquet"))
    with pytest.raises(RunError, match="photos were written elsewhere"):
        spread(photos, tmp_path / "elsewhere", cluster=Cluster(move))
    monkeypatch.setattr("explain.runs.cluster.versions", lambda: {"explain": "9", "torch": "9"})
    with pytest.raises(RunError, match="explain must have the same version"):
        spread(photos, tmp_path / "versions")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.parquet", b"", "Parquet"),
        *(
            ("_run.json", content, r"_run\.json")
            for content in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"manifest": 1}')
        ),
    ],
)
def test_a_folder_that_holds_something_else_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=message):
        spread([picture(0)], tmp_path)
    with pytest.raises(RunError, match=r"_run\.json"):
        open_run(tmp_path)
    with pytest.raises(RunError, match="folder"):
        Storage(tmp_path / name)


def test_a_folder_is_indexed_once_and_again_where_it_changed(maps: Path) -> None:
    index = maps / "_run.sqlite"
    complete = digests(open_run(maps))
    status = index.stat()
    assert digests(open_run(maps)) == complete
    assert index.stat() == status  # nothing was new
    index.write_bytes(b"no database" * 100)
    with pytest.warns(ExplainWarning, match="3 new"):
        assert digests(open_run(maps)) == complete
    first = min(maps.glob("*.parquet"))
    content = first.read_bytes()
    first.unlink()
    with (
        pytest.warns(ExplainWarning, match="2 of 6 photos"),
        pytest.warns(ExplainWarning, match="2 new"),
    ):
        assert len(open_run(maps)) == open_run(maps).photos == 4
    first.write_bytes(content[:-100])
    with pytest.raises(RunError, match="cannot be read"):
        open_run(maps)
    first.write_bytes(content)
    with pytest.warns(ExplainWarning, match="1 new"):
        assert digests(open_run(maps)) == complete


@pytest.mark.filterwarnings("ignore:.*new Parquet files")
def test_no_corruption_of_a_part_gives_other_maps_unseen(maps: Path) -> None:
    first = min(maps.glob("*.parquet"))
    complete = digests(open_run(maps))
    content = first.read_bytes()
    refused = 0
    for seed in range(12):
        first.write_bytes(damaged(content, seed))
        try:
            assert digests(open_run(maps)) == complete
        except RunError:
            refused += 1
    assert refused > 6


def test_an_address_is_indexed_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    photos = folder_of(tmp_path / "photos", 3)
    address = f"memory://{tmp_path}"
    run = spread(photos, address, METHODS, per_file=2)
    assert (run.photos, len(run), run.path.parent) == (3, 6, tmp_path / "cache" / "explain")
    picture(9).save(photos / "more.png")
    cluster = Cluster()
    assert len(spread(photos, address, METHODS, cluster)) == 8
    assert cluster.pieces == [["more.png"]]
    run.path.unlink()
    with pytest.warns(ExplainWarning, match="3 new"):
        run = open_run(address)
    assert len(run.write_pictures("worst:2", tmp_path / "pictures")[0]) == 4
    assert run.insight("gradcam").method == "gradcam"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "s3fs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match="ray"):
        run_on_ray([picture(0)], explainer(), output=tmp_path / "maps")
    with pytest.raises(RunError, match="s3fs"):
        Storage("s3://bucket/maps")
