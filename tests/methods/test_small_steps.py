"""Steps that methods are made of, on inputs that are worked out by hand."""

from __future__ import annotations

import pytest
import torch

from explain.baselines.replacements import Zero
from explain.methods.base import cited, innermost_method, relative_error
from explain.methods.coalitions import centres_of
from explain.methods.estimates import student_factor
from explain.methods.evidence import members, step_lengths
from explain.methods.extremal import shared
from explain.methods.occlusion import Windows
from explain.methods.path import quadrature
from explain.methods.path_variants import ranked
from explain.methods.regions import Felzenszwalb, halves, pixels_near, regions_of
from explain.methods.score_cam import complete_linkage
from explain.methods.shapley import coefficients, cut


def test_what_is_known_of_a_method() -> None:
    assert cited("selvaraju2017gradcam").shorthand == "Selvaraju et al., ICCV 2017"
    assert innermost_method("smooth(saliency)").family == "gradients"
    assert innermost_method("smooth(randomcam)").control == "random weights"
    assert innermost_method("my own").family == "other methods"


def test_relative_errors_are_those_of_the_largest_value() -> None:
    error = relative_error(torch.tensor([[1.0, -4.0]]), torch.tensor([[0.2, 0.1]]))
    torch.testing.assert_close(error, torch.tensor([0.05]))


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.303), (9, 2.262), (1000, 1.962)])
def test_intervals_of_few_values_are_those_of_student(freedom: int, quantile: float) -> None:
    # tables of the 97.5 % quantile
    assert 1.96 * student_factor(freedom) == pytest.approx(quantile, abs=1e-3)


def test_centres_of_regions() -> None:
    assert centres_of(torch.tensor([[0, 1]])).tolist() == [[0.5, 0.25], [0.5, 0.75]]


def test_groups_of_a_level() -> None:
    groups = members(torch.tensor([0, 0, 1, 2]), torch.tensor([True, True, False, True]))
    assert groups.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 1]]
    assert step_lengths(64, range(6, 13)) == [8, 11, 16, 23, 32, 45, 64]


def test_equal_masks_share_what_is_wanted_of_them() -> None:
    ordered = torch.tensor([[0.1, 0.5, 0.5, 0.9]])
    assert shared(ordered, torch.tensor([[0.0, 0.0, 1.0, 1.0]])).tolist() == [[0, 0.5, 0.5, 1]]


def test_cells_of_a_photo() -> None:
    windows = Windows(Zero(), 2, 2).boxes((2, 5))
    assert windows == [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((0, 2), (4, 5))]
    assert halves(((0, 1), (0, 3))) == [((0, 1), (0, 1)), ((0, 1), (1, 3))]
    assert cut(((0, 4), (0, 4))) == (((0, 2), (0, 4)), ((2, 4), (0, 4)))
    assert cut(((0, 2), (0, 5))) == (((0, 2), (0, 2)), ((0, 2), (2, 5)))
    assert cut(((0, 1), (3, 4))) is None


def test_points_and_weights_of_trapezia() -> None:
    points, weights = quadrature("trapezoid", 3)
    assert points.tolist() == [0.0, 0.5, 1.0]
    assert weights.tolist() == [0.25, 0.5, 0.25]


def test_regions_grow_and_are_ranked() -> None:
    dot = torch.tensor([[[1, 0, 0, 0]]]) > 0
    assert pixels_near(dot, 1).int().tolist() == [[[1, 1, 0, 0]]]
    two = torch.tensor([[[1, 1, 0]], [[0, 1, 1]]]) > 0
    assert ranked(torch.tensor([[1.0, 5.0, 3.0]]), two, 1).tolist() == [[1.0, 4.0, 4.0]]


def test_regions_of_similar_colour() -> None:
    x = torch.zeros(1, 3, 4, 6)
    x[..., 3:] = 1
    assert Felzenszwalb(sigma=0)(x)[0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert regions_of(4).across == 4


def test_clusters_by_complete_linkage() -> None:
    places = torch.tensor([0.0, 1.0, 5.0, 5.5, 9.0])
    clusters = complete_linkage((places[:, None] - places).abs(), 2.0)
    assert clusters.tolist() == [0, 0, 1, 1, 2]


def test_weights_of_pairs_of_coalitions() -> None:
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    assert torch.equal(coefficients(signs), signs)
