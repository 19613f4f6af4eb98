"""What is published of the benchmarks is what their commands print; nothing is measured here."""

from __future__ import annotations

import re
import tomllib
from types import ModuleType
from typing import Any

import pytest
import torch

import explain
from tests.conftest import ROOT
from tests.hooks.test_tour import example

BENCHMARKS = ROOT / "examples" / "benchmarks"
COSTS = (ROOT / "docs" / "costs.md").read_text("utf-8")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a script of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: example(f"benchmarks/{name}")


def table_of(module: ModuleType) -> Any:
    """The table that a script prints, with the peers in the versions that the extra asks for."""
    if not isinstance(getattr(module, "COLUMNS", None), dict):
        return module.table()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    pinned = dict(each.split("==") for each in extras["peers"] if "==" in each)
    return module.table({name: pinned.get(distribution) for name, distribution in module.COLUMNS.items()})


@pytest.mark.parametrize(
    "name",
    ["startup", "hooks", "overhead", "pairs", "methods", "covering", "accuracy", "peers", "metrics", "check", "app"],
)
def test_published_rows_are_those_that_the_command_prints(name: str, bench: Any) -> None:
    tables, table = bench("tables"), table_of(bench(name))
    assert table.name == name
    published = tables.published(tables.page_of(name).read_text("utf-8"), name)
    assert table.complaints(published) == []
    if not published:
        return
    first, *rest = published.splitlines()
    assert table.complaints(published.replace(first, first + " more |"))
    assert table.complaints("\n".join([first, *rest[:-1], rest[-1].replace("| ", "| an older ", 1)]))
    assert table.complaints("\n".join([first, *rest[:-1], rest[-1] + " 1.0 |"]))


def test_every_table_of_costs_has_a_command_that_measures_it_and_a_place_in_the_docs(bench: Any) -> None:
    commands = bench("all").COMMANDS
    tables = bench("tables")
    measured = [page for page in tables.PAGES if page.name != "verdict.md"]  # which examples/verdicts.py writes into
    places = [name for page in measured for name in tables.names(page.read_text("utf-8"))]
    assert sorted(commands) == sorted(bench("all").QUICK) == sorted(places)
    for command in commands.values():
        assert (BENCHMARKS / command[0]).exists()
    outside = re.sub(r"<!-- table: .*?<!-- end -->", "", COSTS, flags=re.DOTALL)
    assert not re.findall(r"^\|.*$", outside, re.MULTILINE)


def test_the_options_that_all_tables_are_measured_with_give_the_published_rows(bench: Any) -> None:
    command = bench("all").COMMANDS["overhead"]
    measured = {case[0] for case in bench("overhead").CASES} & set(command[command.index("--models") + 1 :])
    published = bench("tables").published(COSTS, "overhead")
    assert measured == {re.match(r"\| (\w+),", row)[1] for row in published.splitlines()[2:]}  # type: ignore[index]


def test_a_table_takes_the_place_of_an_older_one_and_leaves_the_rest(bench: Any) -> None:
    tables = bench("tables")
    text = "a\n<!-- table: one -->\n| old |\n<!-- end -->\nb\n<!-- table: two -->\n<!-- end -->\n"
    printed = tables.in_markdown("torch 2\n| x \\ y |\n|---|\n| 1 |\nover the goal")
    found = tables.replaced(tables.replaced(text, "one", printed), "two", "| z |")
    assert tables.published(found, "one") == "| x \\ y |\n|---|\n| 1 |\n"
    assert tables.published(found, "two") == "| z |\n"
    assert found.startswith("a\n<!-- table: one -->")
    assert "<!-- end -->\nb\n" in found
    with pytest.raises(ValueError, match="text must"):
        tables.replaced(text, "three", "")
    with pytest.raises(ValueError, match="table 'three' must"):
        tables.page_of("three")


def test_pairs_are_of_methods_that_there_are(bench: Any) -> None:
    assert {name for pair in bench("pairs").PAIRS for name in pair} <= set(explain.list_methods())


def test_known_scores_are_looked_up_by_what_is_seen(bench: Any) -> None:
    accuracy = bench("accuracy")
    scores = torch.rand(2**12, dtype=torch.float64)
    model = accuracy.Known(scores)
    seen = torch.zeros(3, 1, 3, 4)
    seen[1, 0, 0, 2] = seen[2] = 1
    assert model(seen)[:, 0].tolist() == scores[[0, 4, 4095]].tolist()
    found = explain.attribute(model, accuracy.PHOTO, accuracy.KernelSHAP(24, accuracy.COLUMNS), target=0)
    assert found.samples == 24
    assert found.delta.abs().max() < 1e-9
