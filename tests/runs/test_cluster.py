"""Runs on a real Ray cluster of two actors, which is started on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import explain
from explain.cli import main
from explain.runs import Content, Entry, run_on_ray
from explain.runs.runner import State
from explain.store.sources import Folder
from tests.conftest import ROOT
from tests.runs.networks import explainer, folder_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("ray"),
    # what Ray says of itself and of protobuf
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ray: Any = pytest.importorskip("ray", reason="the extra ray is not installed")
parquet: Any = pytest.importorskip("pyarrow.parquet", reason="the extra ray is not installed")
METHODS = ["gradcam", "saliency"]
ACTORS = 2


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=ACTORS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


class Slow(Folder):
    """A folder whose photos take their time, and which says which process reads them."""

    def read(self, entry: Entry) -> Content:
        Path(self.folder, "..", "readers", str(os.getpid())).touch()
        time.sleep(0.05)
        return super().read(entry)


def table(where: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = parquet.read_table(where).to_pylist()
    by_key = {(row["name"], row["method"], row["target"]): row for row in rows}
    assert len(by_key) == len(rows)
    return by_key


def test_two_actors_find_what_one_machine_exports(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 21)
    (tmp_path / "photos" / "bad.png").write_bytes(b"none")
    model_explainer = explainer(categories=list("abcde"))
    options: dict[str, Any] = {"batch_size": 4, "top_k": 2, "metrics": ["insertion"]}
    local = explain.run(
        tmp_path / "photos",
        model_explainer,
        METHODS,
        output=tmp_path / "r.sqlite",
        workers=0,
        **options,
    )
    local.export(tmp_path / "r.parquet")
    run = run_on_ray(
        tmp_path / "photos",
        model_explainer,
        METHODS,
        output=tmp_path / "maps",
        actors=ACTORS,
        per_file=4,
        **options,
    )
    assert table(tmp_path / "maps") == table(tmp_path / "r.parquet")
    ours = parquet.read_table(tmp_path / "maps").schema
    theirs = parquet.read_table(tmp_path / "r.parquet").schema
    assert ours.equals(theirs, check_metadata=False)
    assert (len(run), run.failures) == (84, local.failures)


def test_an_actor_that_is_killed_costs_time_and_nothing_else(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 40)
    (tmp_path / "readers").mkdir()
    killed: list[int] = []

    def kill_one(state: State) -> None:
        if not killed and state.done >= 8:
            killed.append(max(int(file.name) for file in (tmp_path / "readers").iterdir()))
            os.kill(killed[0], signal.SIGKILL)

    run = run_on_ray(
        Slow(tmp_path / "photos"),
        explainer(),
        METHODS,
        output=tmp_path / "maps",
        actors=ACTORS,
        per_file=4,
        batch_size=4,
        progress=kill_one,
    )
    readers = {int(file.name) for file in (tmp_path / "readers").iterdir()}
    assert killed
    assert len(readers) > ACTORS  # another took its place
    assert (run.photos, run.failures, run.ended) == (40, {}, True)
    explain.run(
        tmp_path / "photos",
        explainer(),
        METHODS,
        output=tmp_path / "r.sqlite",
        workers=0,
        batch_size=4,
    ).export(tmp_path / "r.parquet")
    assert table(tmp_path / "maps") == table(tmp_path / "r.parquet")


def test_the_command_runs_on_a_cluster_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "photos", 5)
    words = [
        "run",
        "photos",
        "--ray",
        "--output",
        "maps",
        "-m",
        "gradcam",
        "--model",
        "tiny",
        "--size",
        "32",
    ]
    assert main([*words, "--actors", "1"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("; 5 rows in maps")
    assert main(words) == 0
    assert "explained 0 photos" in capsys.readouterr().out
    assert main([*words, "-m", "saliency"]) == 1
    assert "must be continued as it was begun, but methods: gradcam" in capsys.readouterr().err
