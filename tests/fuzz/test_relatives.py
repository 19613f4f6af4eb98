"""Random networks that take channels last, keep something between calls, or draw random numbers:
their maps are those of the network without that."""

from __future__ import annotations

import warnings

import hypothesis
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.methods import Occlusion
from tests.fuzz.programs import Network, Program, scores_in
from tests.fuzz.sketch import programs
from tests.fuzz.test_networks import ALWAYS

BLOCKS = Occlusion(window=3, stride=3, baseline=0.0)
METHODS = ["saliency", "inputxgradient", BLOCKS]
of_one_photo = programs(6).filter(lambda program: len(program.inputs) == 1)


class Scores(nn.Module):
    """The scores of a random network."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.network = Network(program)

    def forward(self, x: Tensor) -> Tensor:
        return scores_in(self.network(x))


class ChannelsLast(Scores):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2).contiguous())


class Remembering(Scores):
    """Adds half of the last scores of as many images."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        if self.last is not None and self.last.shape == scores.shape:
            scores = scores + 0.5 * self.last
        self.last = scores.detach()
        return scores


class Dropping(Scores):
    """Drops pixels in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, training=True))


def photos(program: Program, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(program.seed)
    return torch.rand(count, *program.inputs[0], generator=generator, dtype=torch.float64)


def maps(model: nn.Module, x: Tensor, methods: list[object], **options: object) -> list[Tensor]:
    with warnings.catch_warnings():  # of zero maps, noise and draws, which are not compared here
        warnings.simplefilter("ignore", explain.ExplainWarning)
        given = explain.attribute(model.eval(), x, methods, target=0, **options)
    return [attribution.values for attribution in given.values()]


@hypothesis.settings(ALWAYS, max_examples=12)
@hypothesis.given(of_one_photo)
def test_channels_may_come_last(program: Program) -> None:
    x = photos(program, 2)
    expected = maps(Scores(program), x, METHODS)
    last = maps(ChannelsLast(program), x.permute(0, 2, 3, 1).contiguous(), METHODS, layout="NHWC")
    for one, other in zip(last, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@hypothesis.settings(ALWAYS, max_examples=12)
@hypothesis.given(of_one_photo)
def test_what_is_kept_between_calls_does_not_come_into_maps(program: Program) -> None:
    for count in (1, 2):
        x = photos(program, count)
        expected = maps(Scores(program), x, METHODS)
        for one, other in zip(maps(Remembering(program), x, METHODS), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@hypothesis.settings(ALWAYS, max_examples=12)
@hypothesis.given(of_one_photo)
def test_a_window_in_which_nothing_changes_has_no_value_whatever_is_drawn(program: Program) -> None:
    torch.manual_seed(program.seed)
    for count in (1, 2, 3):
        x = photos(program, count)
        x[:, :, :3, :3] = 0
        (values,) = maps(Dropping(program), x, [BLOCKS])
        assert not values[..., 0, 0].any()
