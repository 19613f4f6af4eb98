"""Names of earlier versions work as long as the policy says, and warn."""

from __future__ import annotations

import numpy as np
import pytest
from packaging.version import Version
from PIL import Image, ImageChops

import explain
from explain import render
from explain._utils.errors import ExplainWarning, deprecated
from explain.data.images import Box

MAPS = {
    "heat": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    "intensity": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    "signed": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "color": np.linspace(-2, 2, 36, dtype=np.float32).reshape(3, 3, 4),
}


@pytest.mark.parametrize("name", MAPS)
def test_former_names_draw_what_overlay_draws_and_warn_at_the_callers_line(name: str) -> None:
    photo, box = Image.new("RGB", (40, 30), "teal"), Box(4.0, 2.0, 36.0, 28.0)
    with pytest.warns(ExplainWarning, match=rf"^{name} is deprecated since .* goes away in .*; use overlay\(") as said:
        found = getattr(render, name)(photo, MAPS[name], box)
    assert said[0].filename == __file__
    expected = render.overlay(photo, MAPS[name], name, box=box)
    assert ImageChops.difference(found, expected).getbbox() is None
    assert name not in render.__all__


def test_former_names_take_their_former_options() -> None:
    photo, box = Image.new("RGB", (8, 8)), Box(0, 0, 8, 8)
    with pytest.warns(ExplainWarning):
        found = render.heat(photo, MAPS["heat"], box, colormap="gray", alpha=0.3)
    expected = render.overlay(photo, MAPS["heat"], box=box, colormap="gray", alpha=0.3)
    assert ImageChops.difference(found, expected).getbbox() is None


def test_what_is_deprecated_goes_away_in_time() -> None:
    """A name whose time has come must be removed, together with its line here."""
    with pytest.warns(ExplainWarning, match="goes") as said:
        render.color(Image.new("RGB", (8, 8)), MAPS["color"], Box(0, 0, 8, 8))
    until = str(said[0].message).split("goes away in ")[1].split(";")[0]
    assert Version(explain.__version__) < Version(until)


def test_deprecated_functions_keep_their_name_and_arguments() -> None:
    @deprecated("new(x)", since="1.0.0", until="2.0.0")
    def old(x: int, *, y: int = 1) -> int:
        """Add two numbers."""
        return x + y

    with pytest.warns(ExplainWarning, match="old is deprecated"):
        assert old(2, y=3) == 5
    assert (old.__name__, old.__doc__) == ("old", "Add two numbers.")
