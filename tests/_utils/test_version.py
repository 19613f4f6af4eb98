"""Another distribution that imports as `explain` is warned of, once."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import pytest

import explain
from explain import ExplainWarning
from explain._utils.version import SUMMARY, check_distribution
from tests.conftest import ROOT


@pytest.mark.parametrize(("summary", "warned"), [("Generate SQL", True), (f"{SUMMARY}: of old", False)])
def test_another_distribution_is_warned_of(
    summary: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "explain-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: explain\nVersion: 0.1\nSummary: {summary}\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_distribution.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ExplainWarning)
        for _ in range(2):
            explain.Explainer("tiny")
    check_distribution.cache_clear()
    assert len([each for each in said if "explain-hooks" in str(each.message)]) == warned


def test_the_distribution_has_the_name_that_the_check_expects() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"] == "explain-hooks"
