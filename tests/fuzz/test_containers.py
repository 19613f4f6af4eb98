"""Random networks whose modules pass containers to each other; see `tests.fuzz.containers`."""

from __future__ import annotations

import pytest

from tests.fuzz import containers


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(start, marks=pytest.mark.long) for start in (10, 20))]
)
def test_containers_that_modules_pass_to_each_other_go_through_explanations_as_they_are(
    start: int,
) -> None:
    assert sum(map(containers.check, range(start, start + 10))) > 20
