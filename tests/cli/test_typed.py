"""What is typed for units of a layer, and counts at the end of a line."""

from __future__ import annotations

from explain.answers.grounding import Grounding
from explain.cli.output import in_brackets
from explain.cli.several import ablation


def test_units_of_a_layer_are_typed_in_brackets() -> None:
    assert ablation("layer3[12,40]").channels == (12, 40)
    assert ablation("attn[heads 1]").heads == (1,)
    assert ablation("layer2[region 40,30,90,80]").region == (40, 30, 90, 80)


def test_counts_that_are_not_zero_end_a_line() -> None:
    assert in_brackets({"failed": 2, "skipped": 0}) == " (2 failed)"
    assert in_brackets({"failed": 0}) == ""


def test_the_grounding_of_a_word_in_words() -> None:
    text = Grounding(0.9, 0.1, 0.2, None, 0.8).text
    assert text.startswith("grounded: 90 %, 10 %")
    assert "80 %" in text
    assert "another" not in text
