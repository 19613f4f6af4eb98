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
    if not isinstance(getattr(module, "COLUMNS", None), dict):
        return module.table()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    pinned = dict(each.split("==") for each in extras["peers"] if "==" in each)
    return module.table(
        {name: pinned.get(distribution) for name, distribution in module.COLUMNS.items()}
    )


@pytest.mark.parametrize(
    "name",
    [
        "startup",
        "hooks",
        "interventions",
        "overhead",
        "gradients",
        "pairs",
        "graphs",
        "boxes",
        "methods",
        "covering",
        "incremental",
        "accuracy",
        "peers",
        "metrics",
        "check",
        "app",
    ],
)
def test_published_rows_are_those_that_the_command_prints(name: str, bench: Any) -> None:
    tables = bench("tables")
    table = table_of(bench(name))
    assert table.name == name
    published = tables.published(tables.page_of(name).read_text("utf-8"), name)
    assert table.complaints(published) == []
    if not published:
        return
    first, *rest = published.splitlines()
    assert table.complaints(published.replace(first, first + " more |"))
    assert table.complaints(
        "\n".join([first, *rest[:-1], rest[-1].replace("| ", "| an older ", 1)])
    )
    assert table.complaints("\n".join([first, *rest[:-1], rest[-1] + " 1.0 |"]))


def test_every_table_of_costs_has_a_command_that_measures_it_and_a_place_in_the_docs(
    bench: Any,
) -> None:
    commands = bench("all").COMMANDS
    tables = bench("tables")
    # other scripts of examples/ write into them
    others = ("verdict.md", "evidence.md", "leaderboard.md", "parts.md")
    measured = [page for page in tables.PAGES if page.name not in others]
    places = [name for page in measured for name in tables.names(page.read_text("utf-8"))]
    assert sorted(commands) == sorted(bench("all").QUICK) == sorted(places)
    for command in commands.values():
        assert (BENCHMARKS / command[0]).exists()
