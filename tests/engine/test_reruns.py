"""Perturbed rows: run once for all, right whatever the rows beside them, in pieces that fit, and
forgotten again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import ModelError
from explain.baselines import Zero
from explain.engine import Accumulator, Attributions, Evidence, Reducer
from explain.engine.perturbations import Scores, Search, Steps
from explain.methods import (
    AblationCAM,
    Augmented,
    IntegratedGradients,
    Method,
    Saliency,
    ScoreCAM,
    Smooth,
)
from explain.methods.base import Style, get_method
from explain.methods.estimates import SearchMethod, ShownParts
from explain.methods.wrappers import NoisyCopies, noise
from tests.conftest import COVERING, settled

X = torch.randn(3, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
EXACT = {"rtol": 1e-9, "atol": 1e-12}
RERUNNING = [
    name
    for name in explain.list_methods()
    if name not in COVERING
    and any(isinstance(need, (Scores, Attributions)) for need in get_method(name).needs)
]
Tensors = Callable[[torch.Tensor], torch.Tensor]


class Small(nn.Module):
    """A convolution and a head, with something in between or before that may couple rows; notes
    what it is given."""

    def __init__(self, between: Tensors | None = None, before: Tensors | None = None) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)
        self.between, self.before = between or nn.Identity(), before or nn.Identity()
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

    def cleared(self) -> Small:
        self.rows.clear()
        self.given.clear()
        return self

    def times_given(self, row: torch.Tensor) -> int:
        return sum(torch.equal(each, row) for given in self.given for each in given)


def small(between: Tensors | None = None, before: Tensors | None = None) -> Small:
    model = settled(Small(between, before)).double().eval()
    explain.attribute(model, X[:1], "eigencam", target=1, layer="conv")  # looks at the layers
    return model.cleared()


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


def noting(told: list[tuple[int, int]]) -> Callable[[int, int], None]:
    return lambda done, total: told.append((done, total))


# Equal rows run once.


def rows_of(model: Small, methods: Any, targets: Any = (1,), x: torch.Tensor = X[:1]) -> int:
    model.cleared()
    explain.attribute(model, x, methods, targets=list(targets), layer="conv")
    return sum(model.rows)


def test_methods_that_read_the_same_rows_cost_one_of_them() -> None:
    model = small()
    alone = rows_of(model, "smoothgrad")
    assert alone == 1 + 3 + 25  # the photo, the probe and the noisy copies
    assert rows_of(model, ["smoothgrad", "smoothgrad2", "vargrad"]) == alone
    assert rows_of(model, ["smoothgrad", "smooth(gradcam)", "smoothgradcam++"]) == alone


@pytest.mark.parametrize(
    "method", ["scorecam", "smoothgrad", "integratedgradients", "smooth(integratedgradients)"]
)
def test_five_targets_cost_one(method: str) -> None:
    model = small()
    made = PLAIN[method][0]
    assert rows_of(model, [made], range(5)) == rows_of(model, [made])


def test_a_blank_photo_and_the_photo_itself_are_scored_once() -> None:
    model = small()
    rows_of(model, ["scorecam", "sscam", "iscam", "integratedgradients"])
    assert model.times_given(torch.zeros_like(X[0])) == 1
    rows_of(model, ["ablationcam"])
    assert sum(model.rows) == 3  # the photo; from its layer on for all maps; and for one alone


@pytest.mark.parametrize("batch_size", [None, 1, 3, 4, 100])
@pytest.mark.parametrize("method", PLAIN)
def test_every_batch_size_gives_the_plain_computation(method: str, batch_size: int | None) -> None:
    model = small()
    made, plain = PLAIN[method]
    targets = [2, 0, 4]
    found = explain.attribute(
        model, X, made, target=targets, layer="conv", batch_size=batch_size
    ).values
    expected = torch.cat(
        [plain(model, x[None], target) for x, target in zip(X, targets, strict=True)]
    )
    torch.testing.assert_close(found, expected, **EXACT)
    assert found.any()


# Rows that depend on each other.

COUPLED: dict[str, Callable[[], Small]] = {
    "statistics of the batch": lambda: small(
        lambda maps: F.batch_norm(maps, None, None, training=True)
    ),
    "the mean of the batch": lambda: small(lambda maps: 2 * maps - maps.mean(0, keepdim=True)),
    "the largest value of the batch": lambda: small(lambda maps: maps / maps.abs().amax()),
    "the largest value, of the input": lambda: small(before=lambda x: x / (1 + x.abs().amax())),
    "the rows before": lambda: small(lambda maps: maps.cumsum(0)),
    "the row behind": lambda: small(lambda maps: maps + maps.roll(-1, 0)),
    "all but the last row": lambda: small(
        lambda maps: torch.cat([maps[:-1] * len(maps), maps[-1:]])
    ),
}


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize("coupling", COUPLED)
def test_one_image_of_a_network_that_couples_rows_is_run_one_row_at_a_time(
    coupling: str, method: str, batch_size: int | None
) -> None:
    model = COUPLED[coupling]()
    made, plain = PLAIN[method]
    found = explain.attribute(
        model, X[:1], made, target=2, layer="conv", batch_size=batch_size
    ).values
    torch.testing.assert_close(found, plain(model, X[:1], 2), **EXACT)


@dataclass
class Among:
    """A network as a function of one image of the batch: the others stay as they are."""

    model: Small
    image: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._own(self.model(self._put(x, X)))

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        return self._own(self.model.maps(self._put(x, X)))

    def head(self, maps: torch.Tensor) -> torch.Tensor:
        return self._own(self.model.head(self._put(maps, self.model.maps(X))))

    def _put(self, row: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[: self.image], row, rows[self.image + 1 :]])

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.image : self.image + 1]


@pytest.mark.parametrize(
    ("coupling", "batch_size"), [*((name, None) for name in COUPLED), ("the rows before", 1)]
)
def test_images_that_change_each_others_scores_are_explained_as_they_are_in_their_batch(
    coupling: str, batch_size: int | None
) -> None:
    model = COUPLED[coupling]()
    methods = [made for made, _ in PLAIN.values()]
    found = explain.attribute(model, X, methods, target=2, layer="conv", batch_size=batch_size)
    for attribution, (_, plain) in zip(found.values(), PLAIN.values(), strict=True):
        expected = [plain(Among(model, i), X[i : i + 1], 2) for i in range(len(X))]  # type: ignore[arg-type]
        torch.testing.assert_close(attribution.values, torch.cat(expected), **EXACT)


class Counting(Small):
    """Remembers how often it has run."""

    def head(self, maps: torch.Tensor) -> torch.Tensor:
        return super().head(maps) + len(self.rows)


def test_a_network_that_gives_other_scores_each_time_is_refused() -> None:
    model = settled(Counting()).double().eval()
    for method, _ in PLAIN.values():
        for images in (X, X[:1]):
            with pytest.raises(ModelError, match="; ") as error:
                explain.attribute(model, images, method, target=2, layer="conv")
            assert "\n" not in str(error.value)


class Scaled(nn.Module):
    """A network whose scores are tiny, or probabilities of which most are nothing."""

    def __init__(self, inner: nn.Module, scores: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.inner(x))


@pytest.mark.parametrize(
    "scores",
    [lambda y: 1e-6 * y, lambda y: (10 * y - torch.tensor([0.0, 0, 12, 0, 0])).softmax(1)],
    ids=["tiny", "improbable"],
)
def test_coupled_rows_are_found_however_small_the_scores_are(
    scores: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = Scaled(COUPLED["the mean of the batch"]().float(), scores).eval()
    x = X[:1].float()
    pieces, alone = (
        explain.attribute(model, x, IntegratedGradients(steps=8), target=2, batch_size=size).values
        for size in (5, 1)
    )
    torch.testing.assert_close(pieces, alone, rtol=1e-4, atol=1e-7 * float(alone.abs().max()))


def test_a_network_that_couples_nothing_is_run_in_pieces() -> None:
    model = small()
    explain.attribute(model, X[:1], Smooth(samples=12), target=1, batch_size=6)
    assert model.rows == [1, 3, 6, 6]  # the photo, and the probe with it between other rows


def test_a_perturbed_photo_whose_score_is_no_number_is_refused_and_the_layer_is_named() -> None:
    model = small(before=lambda x: x / x.abs().sum((1, 2, 3), keepdim=True))
    with pytest.raises(ModelError, match="finite scores, got nan, first in layer 'conv'"):
        # which scores a blank photo
        explain.attribute(model, X, "scorecam", target=1, layer="conv")


# Targets that pick for each image.

LABELS = torch.tensor([2, 0, 4])


@pytest.mark.filterwarnings("ignore:smoothgradcam.. is zero everywhere for image 0")
@pytest.mark.parametrize("method", RERUNNING)
def test_functions_that_pick_for_each_image_are_exact(method: str) -> None:
    model = small()
    told = list[tuple[int, int]]()
    made = get_method(method)
    made = replace(made, **{option: 4 for option in ("samples", "steps") if hasattr(made, option)})
    expected = explain.attribute(
        model, X, made, target=LABELS, layer="conv", batch_size=1, progress=noting(told)
    ).values
    assert len(told) > 1 or method in ("deeplift", "deepliftshap")  # one row for each image
    assert all(0 < done <= total for done, total in told)
    assert told[-1][0] == told[-1][1]
    for batch_size, pick in {
        None: lambda o, images: o[torch.arange(len(images)), LABELS[images]],
        2: lambda o, images: o[torch.arange(len(images)), LABELS[images]],
        3: lambda o: o[torch.arange(3), LABELS],  # of the images as they are, and of no other rows
    }.items():
        found = explain.attribute(model, X, made, target=pick, layer="conv", batch_size=batch_size)
        torch.testing.assert_close(found.values, expected, **EXACT)


@pytest.mark.parametrize("labels", [LABELS[:1], LABELS[:2], torch.tensor([2, 0, 0])])
def test_functions_of_so_many_rows_are_exact_in_every_batch_size(labels: torch.Tensor) -> None:
    model = small()
    made = IntegratedGradients(steps=4)
    images = X[: len(labels)]
    expected = torch.cat(
        [x * integrated(model, x[None], int(t), 4) for x, t in zip(images, labels, strict=True)]
    )
    for batch_size in (None, 1, 2, 3):
        found = explain.attribute(
            model,
            images,
            made,
            target=lambda o: o[torch.arange(len(labels)), labels],
            batch_size=batch_size,
        )
        torch.testing.assert_close(found.values, expected, **EXACT)


# Memory.

ERRORS = {
    "of torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "of the CPU": lambda: RuntimeError(
        "DefaultCPUAllocator: not enough memory: you tried to allocate 2000000 bytes"
    ),
    "of Python": lambda: MemoryError(),
}


class Limited(Small):
    """Has memory for a few rows at once."""

    most = 100
    failures = 0
    error = "of torch"

    def head(self, maps: torch.Tensor) -> torch.Tensor:
        if len(maps) > self.most:
            self.failures += 1
            raise ERRORS[self.error]()
        return super().head(maps)


def limited(most: int, error: str = "of torch") -> Limited:
    model = settled(Limited()).double().eval()
    explain.attribute(model, X, "eigencam", target=1, layer="conv")
    model.most = most
    model.error = error
    return model


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", PLAIN)
def test_pieces_that_do_not_fit_are_halved_and_counted_once(method: str, error: str) -> None:
    made, plain = PLAIN[method]
    expected = plain(small(), X[:1], 1)
    for batch_size in (None, 8):
        model = limited(3, error)
        told = list[tuple[int, int]]()
        found = explain.attribute(
            model, X[:1], made, target=1, layer="conv", batch_size=batch_size, progress=noting(told)
        )
        torch.testing.assert_close(found.values, expected, **EXACT)
        assert model.failures > 0
        assert told == sorted(set(told))
        assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("method", PLAIN)
def test_a_single_row_that_does_not_fit_raises(method: str) -> None:
    class First(Limited):
        """Fails on all but the photo itself."""

        def head(self, maps: torch.Tensor) -> torch.Tensor:
            self.most = 9 if torch.equal(maps, self.maps(X[:1])) else 0
            return super().head(maps)

    model = settled(First()).double().eval()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        explain.attribute(model, X[:1], PLAIN[method][0], target=1, layer="conv")


@pytest.mark.parametrize("method", PLAIN)
def test_a_network_of_a_fixed_batch_size_that_does_not_fit_raises(method: str) -> None:
    class OfTwo(Small):
        failures = 0

        def head(self, maps: torch.Tensor) -> torch.Tensor:
            if len(maps) != 2:
                raise ValueError("not two images")
            if not torch.equal(maps, self.maps(X[:2])):
                self.failures += 1
                assert self.failures < 9
                raise ERRORS["of torch"]()
            return super().head(maps)

    model = settled(OfTwo()).double().eval()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        explain.attribute(model, X[:2], PLAIN[method][0], target=1, layer="conv")


def test_rows_are_forgotten_however_many_there_are() -> None:
    class Watching(Small):
        def __init__(self) -> None:
            super().__init__()
            self.alive: list[weakref.ref[torch.Tensor]] = []
            self.most = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            output = self.head(self.maps(x))
            self.alive += [weakref.ref(x), weakref.ref(output)]
            return output

    model = settled(Watching()).double().eval()
    for made in (Smooth(samples=60), IntegratedGradients(steps=60), ScoreCAM()):
        explain.attribute(model, X[:1], made, target=1, layer="conv", batch_size=2)
    assert len(model.alive) > 100
    assert model.most <= 8  # the first pass and its output, and those of a piece


# Early ends and progress.


@dataclass(frozen=True)
class Bisection(SearchMethod):
    """How bright a photo may become before its score passes zero, to within ``2 ** -samples``."""

    samples: int = 20
    max_seconds: float | None = None
    name: ClassVar[str] = "bisection"

    def search(self, evidence: Evidence, image: int) -> Search:
        return _Bisecting(self, evidence.inputs, image)


class _Bisecting(Search):
    def __init__(self, method: Bisection, x: torch.Tensor, image: int) -> None:
        self.method = method
        self.x = x
        self.image = image
        self.low = 0.0
        self.high = 1.0

    @property
    def planned(self) -> int:
        return self.method.samples

    def steps(self) -> Steps:
        for _ in range(self.method.samples):
            middle = (self.low + self.high) / 2
            mask = partial(torch.full, (2, 2), dtype=torch.float64)
            (score,) = (yield Scores(ShownParts(Zero(), self.image, [middle], mask))).tolist()
            self.low, self.high = (middle, self.high) if score < 0 else (self.low, middle)

    def map(self) -> torch.Tensor:
        return torch.full((1, *self.x.shape[2:]), self.high)


def test_a_search_asks_for_rows_and_ends_at_its_time() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1)).double()
    with torch.no_grad():
        model[1].weight.fill_(1.0)
        model[1].bias.fill_(-3.0)
    x = torch.stack([torch.full((3, 2, 2), 1.0), torch.full((3, 2, 2), 0.5)]).double()
    found = explain.attribute(model, x, Bisection(), target=0)
    torch.testing.assert_close(found.values[:, 0, 0], torch.tensor([0.25, 0.5]), rtol=0, atol=1e-5)
    assert found.spent is not None
    assert found.spent.tolist() == [20, 20]
    late = explain.attribute(model, x, Bisection(max_seconds=1e-9), target=0)
    assert late.spent is not None
    assert late.spent.tolist() == [0, 0]


@dataclass(frozen=True)
class FirstRows(Reducer):
    """The sum of what is found, until there are enough."""

    most: int

    def begin(self, evidence: Evidence) -> Accumulator:
        return _FirstRows(self.most)


class _FirstRows(Accumulator):
    def __init__(self, most: int) -> None:
        self.most, self.numbers, self.total = most, list[int](), torch.zeros(())

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self.numbers += numbers.tolist()
        self.total = self.total + values.sum(0, keepdim=True)

    def enough(self) -> bool:
        return len(self.numbers) >= self.most

    def result(self) -> torch.Tensor:
        assert self.numbers == list(range(len(self.numbers)))
        return self.total


@dataclass(frozen=True)
class Peek(Method):
    most: int
    name: str = "peek"
    summary: ClassVar[str] = "the first rows"
    style: ClassVar[Style] = "signed"
    found: Any = field(init=False)

    def __post_init__(self) -> None:
        found = Attributions(
            NoisyCopies(40, 0.15, 0), Saliency(absolute=False), FirstRows(self.most)
        )
        object.__setattr__(self, "found", found)

    @property
    def needs(self) -> Any:
        return frozenset({self.found})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[self.found]


def test_a_stream_ends_when_its_reader_has_enough() -> None:
    model = small()
    told = list[tuple[int, int]]()
    expected = sum(gradient(model, copy, 1) for copy in noisy(X[:1], 8))
    model.cleared()
    found = explain.attribute(model, X[:1], Peek(7), target=1, batch_size=4, progress=noting(told))
    assert model.rows == [1, 3, 4, 4]
    assert told == [(4, 40), (8, 40), (40, 40)]
    torch.testing.assert_close(found.values, expected, **EXACT)
    methods = [Peek(7), Peek(20, "peek further"), Smooth(samples=40)]
    together = explain.attribute(model, X[:1], methods, target=1, batch_size=4)
    assert torch.equal(together["peek"].values, found.values)
    torch.testing.assert_close(
        together["smoothgrad"].values, smoothed(model, X[:1], 1, 40), **EXACT
    )


@pytest.mark.parametrize("coupling", [None, "statistics of the batch"])
def test_progress_has_one_total_and_never_goes_back(coupling: str | None) -> None:
    model = small() if coupling is None else COUPLED[coupling]()
    told = list[tuple[int, int]]()
    methods = ["scorecam", "ablationcam", Smooth(samples=6), IntegratedGradients(steps=5)]
    explain.attribute(
        model, X[:1], methods, target=1, layer="conv", batch_size=4, progress=noting(told)
    )
    # of the maps twice, noisy copies, points of the path, and the blank photo
    total = 4 + 4 + 6 + 5 + 1
    assert {all_of_them for _, all_of_them in told} == {total}
    done = [rows for rows, _ in told]
    assert done == sorted(set(done))
    assert done[-1] == total


# The number of rows.


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"), [(12, 5, [4, 4, 4]), (7, 4, [4, 3]), (40, None, [40])]
)
def test_batches_have_as_many_rows_as_fit_shared_evenly(
    samples: int, batch_size: int | None, sizes: list[int]
) -> None:
    model = small()
    explain.attribute(model, X[:1], Smooth(samples=samples), target=1, batch_size=batch_size)
    assert model.rows == [1, 3, *sizes]  # the photo, and the probe


# Baselines, noise and units.


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 5])
def test_each_noisy_copy_has_the_baseline_of_its_image(batch_size: int | None) -> None:
    model = small()
    baseline = torch.rand(
        3, 3, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    made = Smooth(IntegratedGradients(steps=3, baseline=baseline), samples=4)
    found = explain.attribute(model, X, made, target=1, batch_size=batch_size).values
    for x, start, values in zip(X, baseline, found, strict=True):
        each = [(copy - start) * integrated(model, copy, 1, 3, start) for copy in noisy(x[None], 4)]
        torch.testing.assert_close(values[None], sum(each) / 4, **EXACT)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_a_baseline_is_mirrored_with_the_photo(batch_size: int | None, images: int) -> None:
    model = small()
    baseline = torch.rand(
        images, 3, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    made = Augmented(IntegratedGradients(steps=3, baseline=baseline), scales=(1.0,))
    found = explain.attribute(model, X, made, target=1, batch_size=batch_size).values
    for x, start, values in zip(X, baseline.expand(3, -1, -1, -1), found, strict=True):
        both = [
            ((view - begin) * integrated(model, view, 1, 3, begin))
            for view, begin in ((x[None], start), (x[None].flip(-1), start.flip(-1)))
        ]
        torch.testing.assert_close(values[None], (both[0] + both[1].flip(-1)) / 2, **EXACT)
    unmoved = (X[:1].flip(-1) - baseline[:1]) * integrated(
        model, X[:1].flip(-1), 1, 3, baseline[:1]
    )
    moved = 2 * found[:1] - (X[:1] - baseline[:1]) * integrated(model, X[:1], 1, 3, baseline[:1])
    assert (moved - unmoved.flip(-1)).abs().max() > 1e-3


def test_the_mean_gradient_along_the_path_is_in_units_of_score_per_input() -> None:
    model = small()
    found = explain.attribute(
        model, X, IntegratedGradients(steps=12, multiply_by_inputs=False), target=1
    )
    expected = torch.cat([integrated(model, x[None], 1, 12) for x in X])
    torch.testing.assert_close(found.values, expected, **EXACT)
    with torch.no_grad():
        missed = (X * expected).flatten(1).sum(1) - (
            model(X)[:, 1] - model(torch.zeros_like(X))[:, 1]
        )
    torch.testing.assert_close(found.delta, missed, **EXACT)
    assert missed.abs().max() < 1e-6
