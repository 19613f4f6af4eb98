"""Figures and texts of an insight, by hand."""

from __future__ import annotations

import torch

from explain.insight.ablation import sign_test
from explain.insight.class_statistics import MeanWithError
from explain.insight.maps import in_percent, json_value, short, table_lines
from explain.insight.reattribution import in_parts


def test_mcnemars_test() -> None:
    yes = torch.tensor([True, True, True])
    assert sign_test(yes, ~yes) == 0.5**3
    assert sign_test(yes, yes) == 1.0


def test_means_leave_out_what_is_not_known() -> None:
    mean = MeanWithError.of(torch.tensor([1.0, float("nan"), 3.0]))
    assert [mean.value, mean.error] == [2.0, 1.0]


def test_values_as_json_has_them() -> None:
    assert json_value([float("nan"), torch.ones(2)]) == [None, [1.0, 1.0]]


def test_texts_of_tables() -> None:
    assert short("one/folder/of/photos/0001.png") == "…/of/photos/0001.png"
    assert short("one-photo-with-a-long-name.png") == "…to-with-a-long-name.png"
    assert in_percent(0.256) == "26 %"
    assert table_lines([["a", "bcd"], ["ef", "g"]]) == ["  a   bcd", "  ef  g"]


def test_batches_are_joined() -> None:
    photos = torch.arange(200.0).reshape(50, 1, 2, 2)
    sums = in_parts(lambda part: part.flatten(1).sum(1), photos)
    assert torch.equal(sums, photos.sum((1, 2, 3)))
