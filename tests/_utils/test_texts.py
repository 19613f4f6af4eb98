"""Texts that people read: lists, tables, times, and what a misspelt name may stand for."""

from __future__ import annotations

import pytest
from PIL import Image

from explain._utils.html import aligned, lines_html, picture_html, table_html
from explain._utils.options import SpecError, read_written
from explain._utils.progress import duration
from explain._utils.resources import packaged_text
from explain._utils.spelling import close_to, did_you_mean


def test_markup_is_escaped() -> None:
    assert table_html(["layer"], [["<a>"]]).endswith("<tr><td>&lt;a&gt;</td></tr></tbody></table>")
    assert lines_html(["a", "<b>"]).endswith(">a\n&lt;b&gt;</pre>")
    assert 'alt="a &lt;cat&gt;"' in picture_html(Image.new("RGB", (2, 1)), "a <cat>")


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    table = [("layer", "ms"), ("conv", "9")]
    assert aligned(table, to_the_right=[1]) == ["layer  ms", "conv    9"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.24, "4.2 s"), (42, "42 s"), (200, "3 min"), (9000, "2.5 h")]
)
def test_a_time_is_given_in_the_unit_that_people_would_choose(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_misspelt_name_is_told_the_closest_ones() -> None:
    methods = ["gradcam", "saliency"]
    assert did_you_mean("gradcan", methods) == "did you mean 'gradcam'?"
    assert did_you_mean("Grad-CAM", ["xgradcam", "gradcam"]) == "did you mean 'gradcam'?"
    assert did_you_mean("zzz", methods) == "known: gradcam, saliency"
    assert close_to("centre", ["center", "whole"]) == ["center"]


def test_a_name_with_options_is_read_without_being_run() -> None:
    smooth = read_written("Smooth(gradcam++(), samples=5)")
    assert smooth.name == "smooth"
    assert smooth.values == ("gradcam++()",)
    assert smooth.options == {"samples": 5}
    assert read_written("kpcacam(kernel=rbf, gamma=None)").options == {
        "kernel": "rbf",
        "gamma": None,
    }
    with pytest.raises(SpecError):
        read_written("rise(samples=5, samples=6)")


def test_a_file_of_the_package_is_read() -> None:
    assert "def packaged_text" in packaged_text("explain._utils", "resources.py")
