"""Perturbed rows: run once for all, right whatever the rows beside them, in pieces that fit, and
forgotten again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import ModelError
from explain.engine.blocks import with_first
from explain.methods import (
    IDGI,
    AblationCAM,
    Augmented,
    IntegratedGradients,
    ScoreCAM,
    Smooth,
)
from explain.methods.wrappers import noise
from tests.conftest import layer_for, settled

X = torch.randn(3, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
EXACT = {"rtol": 1e-9, "atol": 1e-12}
Tensors = Callable[[torch.Tensor], torch.Tensor]


class Small(nn.Module):
    """A convolution and a head, with something in between or before that may couple rows; notes
    what it is given."""

    def __init__(self, between: Tensors | None = None, before: Tensors | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)
        self.between = between or nn.Identity()
        self.before = before or nn.Identity()
        self.rows: list[int] = []
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        self.given.append(x.detach().clone())
        return self.head(self.maps(x))

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.before(x))

    def head(self, maps: torch.Tensor) -> torch.Tensor:
        return self.fc(self.between(F.softplus(maps)).square().mean((2, 3)))

    def times_given(self, row: torch.Tensor) -> int:
        return sum(torch.equal(each, row) for given in self.given for each in given)


def small(between: Tensors | None = None, before: Tensors | None = None) -> Small:
    model = settled(Small(between, before)).double().eval()
    explain.attribute(
        model, X[:1], "eigencam", target=1, layer="conv", placement="even"
    )  # looks at the layers
    model.rows.clear()
    model.given.clear()
    return model


# Plain computations, of one image and one row at a time.


def integrated(
    model: Small, x: torch.Tensor, target: int, steps: int, baseline: torch.Tensor | float = 0.0
) -> Any:
    """The mean gradient along the path."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    start = torch.zeros_like(x) + baseline
    total = torch.zeros_like(x)
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        total += weight * gradient(model, start + point * (x - start), target)
    return total


def gradient(model: Small, x: torch.Tensor, target: int) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x)[0, target], x)[0]


def noisy(x: torch.Tensor, samples: int) -> list[torch.Tensor]:
    return [x + 0.15 * (x.max() - x.min()) * noise(0, i, x[0]) for i in range(samples)]


def smoothed(model: Small, x: torch.Tensor, target: int, samples: int) -> torch.Tensor:
    return sum(gradient(model, copy, target) for copy in noisy(x, samples)) / samples


@torch.no_grad()
def scorecam(model: Small, x: torch.Tensor, target: int) -> torch.Tensor:
    maps = model.maps(x)
    scores = []
    for channel in maps[0]:
        mask = (channel - channel.min()) / (channel.max() - channel.min())
        scores.append(model(x * mask)[0, target])
    return (torch.stack(scores).softmax(0)[:, None, None] * maps[0]).sum(0)[None].relu()


@torch.no_grad()
def ablationcam(model: Small, x: torch.Tensor, target: int) -> torch.Tensor:
    maps = model.maps(x)
    score = model.head(maps)[0, target]
    total = torch.zeros_like(maps[:, 0])
    for channel in range(maps.shape[1]):
        without = maps.clone()
        without[:, channel] = 0
        total += (score - model.head(without)[0, target]) / score * maps[:, channel]
    return total.relu()


PLAIN: dict[str, tuple[Any, Callable[[Small, torch.Tensor, int], torch.Tensor]]] = {
    "integratedgradients": (
        IntegratedGradients(steps=5),
        lambda m, x, t: x * integrated(m, x, t, 5),
    ),
    "smoothgrad": (Smooth(samples=4), lambda m, x, t: smoothed(m, x, t, 4)),
    "scorecam": (ScoreCAM(), scorecam),
    "ablationcam": (AblationCAM(), ablationcam),
    "smooth(integratedgradients)": (
        Smooth(IntegratedGradients(steps=2), samples=3),
        lambda m, x, t: sum(c * integrated(m, c, t, 2) for c in noisy(x, 3)) / 3,
    ),
}


def test_a_blank_photo_and_the_photo_itself_are_scored_once() -> None:
    model = small()
    methods = ["scorecam", "sscam", "iscam", "integratedgradients"]
    explain.attribute(model, X[:1], methods, target=1, layer="conv", placement="even")
    assert model.times_given(torch.zeros_like(X[0])) == 1
    model.rows.clear()
    explain.attribute(model, X[:1], "ablationcam", target=1, layer="conv", placement="even")
    # the photo; from its layer on for all maps; and twice for one alone
    assert sum(model.rows) == 4


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("method", PLAIN)
def test_every_batch_size_gives_the_plain_computation(method: str, batch_size: int | None) -> None:
    model = small()
    asked, plain = PLAIN[method]
    classes = [2, 0, 4]
    rows = zip(X, classes, strict=True)
    expected = torch.cat([plain(model, x[None], target) for x, target in rows])
    assert expected.any()
    how = {"layer": layer_for(asked, "conv"), "batch_size": batch_size}
    for target in (classes, lambda output: output[torch.arange(3), classes]):
        values = explain.attribute(model, X, asked, target=target, **how, placement="even").values
        torch.testing.assert_close(values, expected, **EXACT)


COUPLED: dict[str, Tensors] = {
    "statistics of the batch": lambda maps: F.batch_norm(maps, None, None, training=True),
    "the mean of the batch": lambda maps: 2 * maps - maps.mean(0, keepdim=True),
    "the largest value": lambda maps: maps / (1 + maps.abs().amax()),
    "the rows before": lambda maps: maps.cumsum(0),
    "all but the last row": lambda maps: torch.cat([maps[:-1] * len(maps), maps[-1:]]),
}


@dataclass
class Among:
    """A network as a function of one image of the batch: the others stay as they are."""

    model: Small
    image: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self._beside(x, X))[[self.image]]

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.maps(self._beside(x, X))[[self.image]]

    def head(self, maps: torch.Tensor) -> torch.Tensor:
        return self.model.head(self._beside(maps, self.model.maps(X)))[[self.image]]

    def _beside(self, row: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[: self.image], row, rows[self.image + 1 :]])


def gradcam(model: Small, x: torch.Tensor, target: int) -> torch.Tensor:
    maps = model.maps(x).detach().requires_grad_()
    (of_maps,) = torch.autograd.grad(model.head(maps)[0, target], maps)
    return (of_maps.mean((2, 3), keepdim=True) * maps).sum(1).detach()


@torch.no_grad()
def occlusion(model: Small, x: torch.Tensor, target: int) -> torch.Tensor:
    return (model(x) - model(0 * x))[:, target, None, None].expand(-1, 6, 5)


OF_GRADIENTS: dict[str, tuple[Any, Callable[[Small, torch.Tensor, int], torch.Tensor]]] = {
    "saliency": ("saliency(absolute=False)", gradient),
    "gradcam": ("gradcam(relu=False)", gradcam),
    "occlusion": ("occlusion(window=(6,5))", occlusion),
}


@pytest.mark.parametrize(
    ("coupling", "batch_size"), [*((name, None) for name in COUPLED), ("the rows before", 1)]
)
def test_images_that_change_each_others_scores_are_explained_as_they_are_in_their_batch(
    coupling: str, batch_size: int | None
) -> None:
    model = small(COUPLED[coupling])
    compared = PLAIN | (OF_GRADIENTS if coupling == "statistics of the batch" else {})
    methods = [asked for asked, _ in compared.values()]
    targets = [2, 0, 4]
    how = {"layer": "conv", "batch_size": batch_size}
    maps = explain.attribute(model, X, methods, target=targets, **how, placement="even")
    for name, (_, plain) in compared.items():
        for i, target in enumerate(targets):
            expected = plain(Among(model, i), X[[i]], target)  # type: ignore[arg-type]
            torch.testing.assert_close(maps[name].values[[i]], expected, **EXACT)


def test_a_perturbed_photo_whose_score_is_no_number_is_refused_and_the_layer_is_named() -> None:
    model = small(before=lambda x: x / x.abs().sum((1, 2, 3), keepdim=True))
    with pytest.raises(ModelError, match="finite scores, got nan, first in layer 'conv'"):
        # which scores a blank photo
        explain.attribute(model, X, "scorecam", target=1, layer="conv", placement="even")


def noting(steps: list[tuple[int, int]]) -> Callable[[int, int], None]:
    return lambda rows, total: steps.append((rows, total))


def test_batches_are_as_large_after_a_pass_that_failed() -> None:
    class Late(nn.Module):
        fails = True

        def forward(self, maps: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("not yet")
            return maps

    wide = nn.Sequential(nn.Conv2d(3, 1024, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Identity(), Late(), wide, nn.Linear(1024, 2)).eval()
    x = torch.rand(1, 3, 28, 28)  # so few windows that no trial of speed decides

    def steps() -> list[tuple[int, int]]:
        noted: list[tuple[int, int]] = []
        explain.attribute(
            model, x, "occlusion(window=8)", target=1, progress=noting(noted), placement="even"
        )
        return noted

    with pytest.raises(ValueError, match="not yet"):
        steps()
    Late.fails = False
    after_failure = steps()
    assert len(after_failure) > 2
    assert after_failure == steps()


ERRORS = {
    "of torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "of the CPU": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"),
    "of Python": MemoryError(),
}


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("method", PLAIN)
def test_pieces_that_do_not_fit_are_halved_and_counted_once(
    method: str, error: BaseException, batch_size: int | None
) -> None:
    asked, plain = PLAIN[method]
    model = small()
    expected = plain(model, X[:1], 1)
    head = model.head
    failures: list[int] = []

    def limited(maps: torch.Tensor) -> torch.Tensor:
        if len(maps) > 3:
            failures.append(len(maps))
            raise error
        return head(maps)

    model.head = limited  # type: ignore[method-assign]
    steps: list[tuple[int, int]] = []
    where = layer_for(asked, "conv")
    how = {"layer": where, "batch_size": batch_size, "progress": noting(steps)}
    values = explain.attribute(model, X[:1], asked, target=1, **how, placement="even").values
    torch.testing.assert_close(values, expected, **EXACT)
    assert failures
    assert steps == sorted(set(steps))
    assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("coupling", [None, COUPLED["statistics of the batch"]])
def test_progress_has_one_total_and_never_goes_back(coupling: Tensors | None) -> None:
    steps: list[tuple[int, int]] = []
    methods = ["scorecam", "ablationcam", Smooth(samples=6), IntegratedGradients(steps=5)]
    how = {"batch_size": 4, "progress": noting(steps)}
    explain.attribute(
        small(coupling), X[:1], methods, target=1, layer="conv", **how, placement="even"
    )
    # of the maps twice, noisy copies, points of the path, and the blank photo
    total = 4 + 4 + 6 + 5 + 1
    assert {last for _, last in steps} == {total}
    rows = [count for count, _ in steps]
    assert rows == sorted(set(rows))
    assert rows[-1] == total


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5])
@pytest.mark.parametrize("images", [1, 3])
def test_each_copy_of_an_image_has_its_baseline(images: int, batch_size: int | None) -> None:
    """Noisy copies have it as it is, and mirrored ones mirrored."""
    model = small()
    g = torch.Generator().manual_seed(3)
    baseline = torch.rand(images, 3, 6, 5, generator=g, dtype=torch.float64)
    path = IntegratedGradients(steps=3, baseline=baseline)

    def plain(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return (x - start) * integrated(model, x[None], 1, 3, start)[0]

    methods = [Smooth(path, samples=4), Augmented(path, scales=(1.0,))]
    maps = explain.attribute(model, X, methods, target=1, batch_size=batch_size, placement="even")
    smooth, augmented = (a.values for a in maps.values())
    for i, (x, start) in enumerate(zip(X, baseline.expand_as(X), strict=True)):
        copies = [plain(copy[0], start) for copy in noisy(x[None], 4)]
        torch.testing.assert_close(smooth[i], sum(copies) / 4, **EXACT)
        mirrored = plain(x.flip(-1), start.flip(-1)).flip(-1)
        torch.testing.assert_close(augmented[i], (plain(x, start) + mirrored) / 2, **EXACT)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda scores: 1e-6 * scores,
        lambda scores: (10 * scores - torch.tensor([0.0, 0, 12, 0, 0])).softmax(1),
    ],
    ids=["tiny scores", "small probabilities"],
)
def test_coupled_rows_are_seen_however_small_the_scores_are(scaled: Tensors) -> None:
    model = small(COUPLED["the mean of the batch"]).float()
    head = model.head
    model.head = lambda maps: scaled(head(maps))  # type: ignore[method-assign]
    method = IntegratedGradients(steps=8)
    pieces, alone = (
        explain.attribute(
            model, X[:1].float(), method, target=2, batch_size=size, placement="even"
        ).values
        for size in (5, 1)
    )
    torch.testing.assert_close(pieces, alone, rtol=1e-4, atol=1e-7 * float(alone.abs().max()))


@pytest.mark.parametrize("value", [5, None])
def test_the_first_argument_of_a_block_is_changed_where_keywords_alone_are_given(
    value: int | None,
) -> None:
    """The module's signature tells which keyword is the first."""

    class Block(nn.Module):
        def forward(self, hidden: int, mask: int) -> int:
            return hidden + mask

    changed = with_first(Block(), (), {"mask": 1, "hidden": 2}, lambda hidden: value)
    assert changed == (None if value is None else ((), {"mask": 1, "hidden": 5}))


class Answer(torch.autograd.Function):
    """Copies an output to the tensor that is kept for as many rows, as wrappers of CUDA graphs
    do."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: dict[int, torch.Tensor]) -> torch.Tensor:
        answer = kept.setdefault(len(output), torch.empty_like(output)).copy_(output)
        return answer.view_as(answer)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Buffered(Small):
    """Answers in tensors of its own, which the next pass of as many rows overwrites."""

    def __init__(self) -> None:
        super().__init__()
        kept: dict[int, torch.Tensor] = {}
        self.answer = lambda output: Answer.apply(output, kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(super().forward(x))


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("images", [1, 3])
def test_an_answer_that_the_next_pass_overwrites_is_copied(
    images: int, batch_size: int | None
) -> None:
    plain = small()
    model = Buffered().double().eval()
    model.load_state_dict(plain.state_dict())
    x = X[:images]
    methods = [asked for asked, _ in PLAIN.values()] + [IDGI(IntegratedGradients(4)), "deeplift"]
    how = {"layer": "conv", "batch_size": batch_size}
    maps = explain.attribute(model, x, methods, target=1, **how, placement="even")
    expected = explain.attribute(plain, x, methods, target=1, **how, placement="even")
    with torch.no_grad():
        score, score_of_zeros = plain(x)[:, 1], plain(0 * x)[:, 1]
    for name, attribution in maps.items():
        torch.testing.assert_close(attribution.score, score, **EXACT)
        torch.testing.assert_close(attribution.values, expected[name].values, **EXACT)
        if name in ("idgi", "integratedgradients", "deeplift"):
            missed = attribution.values.sum((1, 2, 3)) - (score - score_of_zeros)
            torch.testing.assert_close(attribution.delta, missed, **EXACT)
