"""Random networks that take channels last, keep something between calls, draw random numbers, put
the pixels in another order, or are members of an ensemble: their maps are those of the network
without that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import LRP, HiResCAM, Occlusion
from tests.fuzz.programs import Network, Program, scores_in
from tests.fuzz.sketch import programs
from tests.fuzz.test_networks import ALWAYS

BLOCKS = Occlusion(window=3, stride=3, baseline=0.0)
METHODS = ["saliency", "inputxgradient", BLOCKS]
of_one_photo = programs(6).filter(lambda program: len(program.inputs) == 1)
giving_tensors = of_one_photo.filter(
    lambda program: {program.output, *(gives for *_, gives in program.blocks)} == {"tensor"}
)


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


class Ordered(Scores):
    """Takes the pixels as tokens in a fixed order, or in one that each pass draws, and puts them
    back into their places."""

    def __init__(self, program: Program, *, draws: bool) -> None:
        super().__init__(program)
        _, height, width = program.inputs[0]
        self.draws = draws
        self.order = torch.randperm(height * width)
        self.tokens = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        order = self.order.expand(len(x), -1)
        if self.draws:
            order = torch.rand(order.shape).argsort(1)
        pixels = x.flatten(2)
        order = order[:, None].expand_as(pixels)
        tokens = self.tokens(pixels.gather(2, order).mT)
        placed = torch.zeros_like(pixels).scatter(2, order, tokens.mT)
        return super().forward(placed.unflatten(2, x.shape[2:]))


class Scaled(Scores):
    """Scales the photo: by a product, or by an operator of a library."""

    def __init__(self, program: Program, scale: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__(program)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale(x.clone(), -0.5))


class OfAverages(nn.Module):
    """Scores of averages that are zero but for rounding errors, and of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 3, dtype=torch.float64)
        self.head = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        normalised = F.instance_norm(F.silu(self.first(x)))
        return self.head((normalised * 0.5).mean((2, 3)))


class Members(nn.Module):
    """The mean of networks that see the same photo, or its mirror image in one call more."""

    def __init__(self, *members: nn.Module, mirrors: bool = False) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.mirrors = mirrors

    def forward(self, x: Tensor) -> Tensor:
        seen = [x, x.flip(3)] if self.mirrors else [x]
        return torch.stack([member(each.clone()) for member in self.members for each in seen]).mean(
            0
        )


def photos(program: Program, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(program.seed)
    return torch.rand(count, *program.inputs[0], generator=generator, dtype=torch.float64)


def told(model: nn.Module, x: Tensor) -> tuple[explain.Attribution, bool]:
    """HiResCAM of a network, and whether a warning says that it leaves branches out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", explain.ExplainWarning)
        found = explain.attribute(model.eval(), x, HiResCAM(), target=0)
    return found, any("leaves out" in str(warning.message) for warning in caught)


def maps(model: nn.Module, x: Tensor, methods: list[object], **options: object) -> list[Tensor]:
    with warnings.catch_warnings():  # of zero maps, noise and draws, which are not compared here
        warnings.simplefilter("ignore", explain.ExplainWarning)
        given = explain.attribute(model.eval(), x, methods, target=0, **options)
    return [attribution.values for attribution in given.values()]


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(of_one_photo)
def test_channels_may_come_last(program: Program) -> None:
    x = photos(program, 2)
    expected = maps(Scores(program), x, METHODS)
    last = maps(ChannelsLast(program), x.permute(0, 2, 3, 1).contiguous(), METHODS, layout="NHWC")
    for one, other in zip(last, expected, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-12)


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(of_one_photo)
def test_what_is_kept_between_calls_does_not_come_into_maps(program: Program) -> None:
    for count in (1, 2):
        x = photos(program, count)
        expected = maps(Scores(program), x, METHODS)
        for one, other in zip(maps(Remembering(program), x, METHODS), expected, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-12)


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(of_one_photo)
def test_a_window_in_which_nothing_changes_has_no_value_whatever_is_drawn(program: Program) -> None:
    torch.manual_seed(program.seed)
    for count in (1, 2, 3):
        x = photos(program, count)
        x[:, :, :3, :3] = 0
        (values,) = maps(Dropping(program), x, [BLOCKS])
        assert not values[..., 0, 0].any()


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(of_one_photo)
def test_operators_of_libraries_are_what_they_compute_or_named(program: Program) -> None:
    x = photos(program, 2)
    operators = torch.ops.explain_fuzz
    methods = [LRP("Gradient"), "guidedbackprop"]
    expected = maps(Scaled(program, torch.mul), x, methods)
    for operator, count in ((operators.scale, 1), (operators.scale_, 0)):
        model = Scaled(program, operator).eval()
        for one, other in zip(maps(model, x, methods), expected, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", explain.ExplainWarning)
            missed = explain.attribute(model, x, LRP("Epsilon"), target=0).coverage.missed
        assert missed.get("explain_fuzz::scale", 0) == sum(missed.values()) == count


@pytest.mark.parametrize("composite", ["DeepTaylor", "ExcitationBackprop"])
def test_relevance_of_rounding_errors_alone_is_told(composite: str) -> None:
    torch.manual_seed(3)
    told = 0
    for size in range(5, 12):
        x = torch.randn(1, 3, size, size, dtype=torch.float64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", explain.ExplainWarning)
            a = explain.attribute(OfAverages(), x, LRP(composite), target=0)
        missing = a.values.sum() + sum(a.coverage.taken.values()) - a.score
        assert_close(a.delta, missing)
        is_told = any("misses" in str(warning.message) for warning in caught)
        assert is_told or float(missing.abs()) < 0.01 * float(a.score.abs())
        told += is_told
    assert told


def products(model: nn.Module, x: Tensor, layers: list[str]) -> list[Tensor]:
    """What each position of some layers adds to the first score, by plain autograd."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> Tensor:
        kept.append(output)
        return output.clone()  # which may be written over

    handles = [model.get_submodule(layer).register_forward_hook(keep) for layer in layers]
    score = model(2 * x.clone().requires_grad_() / 2)[:, 0].sum()
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(score, kept, allow_unused=True, materialize_grads=True)
    return [(a * g).detach() for a, g in zip(kept, gradients, strict=True)]


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(of_one_photo, st.booleans())
def test_pixels_may_be_tokens_in_any_order(program: Program, draws: bool) -> None:
    """A map of tokens in an order that is drawn may be refused."""
    torch.manual_seed(program.seed)
    for count in (1, 2):
        x = photos(program, count)
        model = Ordered(program, draws=draws).eval()
        expected = maps(Scores(program), x, METHODS)
        for one, other in zip(maps(model, x, METHODS), expected, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-12)
        model.draws = False
        (of_tokens,) = products(model, x, ["tokens"])
        laid_out = torch.zeros(count, of_tokens.shape[1], dtype=x.dtype)
        laid_out[:, model.order] = of_tokens.sum(2)
        model.draws = draws
        try:
            (found,) = maps(model, x, [HiResCAM()], layer="tokens")
        except explain.LayerError:
            assert draws
            continue
        assert_close(found.flatten(1), laid_out, rtol=1e-9, atol=1e-12)


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(giving_tensors, st.sampled_from([(2, False), (3, False), (1, True)]))
def test_the_map_of_members_is_the_sum_of_theirs_or_says_what_it_leaves_out(
    program: Program, kind: tuple[int, bool]
) -> None:
    count, mirrors = kind
    x = photos(program, 2)
    members = [Scores(replace(program, seed=program.seed + i)) for i in range(count)]
    try:
        alone = [told(member, x)[0].layer for member in members]
    except explain.LayerError:
        hypothesis.reject()
    hypothesis.assume(len(set(alone)) == 1 and isinstance(alone[0], str) and "@" not in alone[0])
    model = Members(*members, mirrors=mirrors)
    layers = [f"members.{i}.{alone[0]}" for i in range(count)]
    of_layers = [part.sum(1) for part in products(model, x, layers)]
    found, leaves_out = told(model, x)
    if leaves_out:
        name, _, call = str(found.layer).partition("@")
        of_layers = [products(model, x, [name])[int(call or -1)].sum(1)]
    elif mirrors:
        # maps of other cells are added on the photo
        hypothesis.assume(of_layers[0].shape == found.values.shape)
        of_layers[1] = of_layers[1].flip(2)
    assert_close(found.values, sum(of_layers))
