"""Runs on a real Ray cluster of two actors, which is started on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explain.runs import Content, Entry, run_on_ray
from explain.runs.runner import State
from explain.store.sources import Folder
from tests.cli.conftest import Typed
from tests.conftest import ROOT
from tests.runs.networks import explainer, folder_of, stored_run
from tests.runs.test_spreading import by_key

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


def test_an_actor_that_is_killed_costs_time_and_nothing_else(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "photos", 40)
    (source / "bad.png").write_bytes(b"none")
    readers = tmp_path / "readers"
    readers.mkdir()
    killed: list[int] = []

    def kill_one(state: State) -> None:
        if not killed and state.done >= 8:
            killed.append(max(int(file.name) for file in readers.iterdir()))
            os.kill(killed[0], signal.SIGKILL)

    options: dict[str, Any] = {"batch_size": 4, "metrics": ["insertion"]}
    cluster: dict[str, Any] = {"actors": ACTORS, "per_file": 4, "progress": kill_one}
    maps = tmp_path / "maps"
    run = run_on_ray(Slow(source), explainer(), METHODS, output=maps, **cluster, **options)
    assert killed
    assert len(list(readers.iterdir())) > ACTORS  # another took its place
    local = stored_run(tmp_path, source, explainer(), METHODS, **options)
    local.export(tmp_path / "r.parquet")
    assert (run.photos, run.failures, run.ended) == (40, local.failures, True)
    assert by_key(maps) == by_key(tmp_path / "r.parquet")
    schemas = [parquet.read_table(place).schema for place in (maps, tmp_path / "r.parquet")]
    assert schemas[0].equals(schemas[1], check_metadata=False)


def test_the_command_runs_on_a_cluster_and_goes_on(tmp_path: Path, typed: Typed) -> None:
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
    assert typed(*words, "--actors", "1")[1][-1].endswith("; 5 rows in maps")
    assert "explained 0 photos" in typed(*words)[1][-1]
    code, _, err = typed(*words, "-m", "saliency")
    assert code == 1
    assert "must be continued as it was begun, but methods: gradcam" in "\n".join(err)
