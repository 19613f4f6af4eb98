"""What is published of the benchmarks is what their commands print; nothing is measured here."""

from __future__ import annotations

import tomllib
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.hooks.test_tour import example

BENCHMARKS = ROOT / "examples" / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a script of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: example(f"benchmarks/{name}")


def table_of(module: ModuleType) -> Any:
    """The table that a script prints, with the peers in the versions that the extra asks for."""
    columns = getattr(module, "COLUMNS", None)
    if not isinstance(columns, dict):
        return module.table()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    peers = project["optional-dependencies"]["peers"]
    pinned = dict(peer.split("==") for peer in peers if "==" in peer)
    return module.table({name: pinned.get(peer) for name, peer in columns.items()})


NAMES = (
    "startup hooks interventions overhead gradients pairs graphs boxes methods covering "
    "incremental accuracy peers metrics check app"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_published_rows_are_those_that_the_command_prints(name: str, bench: Any) -> None:
    tables = bench("tables")
    table = table_of(bench(name))
    assert table.name == name
    published = tables.published(tables.page_of(name).read_text("utf-8"), name)
    assert table.complaints(published) == []
    if published:
        assert table.complaints(published.replace("|\n", "| more |\n", 1))
