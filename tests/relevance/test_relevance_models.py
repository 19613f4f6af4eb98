"""Relevance on networks that others wrote, one of every family: conserved, the same again, and
nothing left behind.

All of them are in ``examples/relevance_matrix.py``.
"""

from __future__ import annotations

import pytest

from tests.hooks.test_tour import example, scripts_of
from tests.models.test_matrix import FAMILIES, HUGGING_FACE, TIMM, subject_of

with scripts_of("."):
    relevance_matrix = example("relevance_matrix")


def assert_no_failures(source: str, name: str) -> None:
    row = relevance_matrix.examine(subject_of(source, name))
    assert not row.failures, str(row)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_relevance_on_torchvisions_families(name: str) -> None:
    assert_no_failures("torchvision", name)


@pytest.mark.long
@pytest.mark.parametrize("name", TIMM)
def test_relevance_on_families_of_timm(name: str) -> None:
    pytest.importorskip("timm", reason="timm comes with an extra of its own")
    assert_no_failures("timm", name)


@pytest.mark.long
@pytest.mark.parametrize("name", [*HUGGING_FACE, "MobileViT", "Levit", "Cvt", "Swinv2"])
def test_relevance_on_families_of_hugging_face(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers comes with an extra of its own")
    assert_no_failures("transformers", name)
