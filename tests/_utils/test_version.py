"""The name of the distribution, which is another than that of the import."""

from __future__ import annotations

import tomllib

from tests.conftest import ROOT


def test_the_distribution_has_its_own_name() -> None:
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"]
        == "explain-hooks"
    )
