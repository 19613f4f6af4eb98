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
    AblationCAM,
    Augmented,
    IntegratedGradients,
    ScoreCAM,
    Smooth,
)
from explain.methods.wrappers import noise
from tests.conftest import settled

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


def test_a_blank_photo_and_the_photo_itself_are_scored_once() -> None:
    model = small()
    rows_of(model, ["scorecam", "sscam", "iscam", "integratedgradients"])
    assert model.times_given(torch.zeros_like(X[0])) == 1
    rows_of(model, ["ablationcam"])
    assert sum(model.rows) == 3  # the photo; from its layer on for all maps; and for one alone


@pytest.mark.parametrize("batch_size", [None, 1, 4])
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
    "the largest value, of the input": lambda: small(before=lambda x: x / (1 + x.abs().amax())),
    "the rows before": lambda: small(lambda maps: maps.cumsum(0)),
    "all but the last row": lambda: small(
        lambda maps: torch.cat([maps[:-1] * len(maps), maps[-1:]])
    ),
}


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


def test_a_perturbed_photo_whose_score_is_no_number_is_refused_and_the_layer_is_named() -> None:
    model = small(before=lambda x: x / x.abs().sum((1, 2, 3), keepdim=True))
    with pytest.raises(ModelError, match="finite scores, got nan, first in layer 'conv'"):
        # which scores a blank photo
        explain.attribute(model, X, "scorecam", target=1, layer="conv")


# Targets that pick for each image.


@pytest.mark.parametrize("labels", [torch.tensor(labels) for labels in ([2], [2, 0], [2, 0, 0])])
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


# Early ends and progress.


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


@pytest.mark.parametrize(("images", "batch_size"), [(1, None), (3, 2)])
def test_a_baseline_is_mirrored_with_the_photo(images: int, batch_size: int | None) -> None:
    model = small()
    generator = torch.Generator().manual_seed(3)
    baseline = torch.rand(images, 3, 6, 5, generator=generator, dtype=torch.float64)
    method = Augmented(IntegratedGradients(steps=3, baseline=baseline), scales=(1.0,))
    values = explain.attribute(model, X, method, target=1, batch_size=batch_size).values
    starts = baseline.expand_as(X)

    def plainly(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return (x - start) * integrated(model, x[None], 1, 3, start)[0]

    for x, start, image in zip(X, starts, values, strict=True):
        mirrored = plainly(x.flip(-1), start.flip(-1)).flip(-1)
        torch.testing.assert_close(image, (plainly(x, start) + mirrored) / 2, **EXACT)


@pytest.mark.parametrize("shift", [None, 12.0], ids=["tiny scores", "small probabilities"])
def test_coupled_rows_are_seen_however_small_the_scores_are(shift: float | None) -> None:
    model = COUPLED["the mean of the batch"]().float()
    head = model.head

    def scaled(maps: torch.Tensor) -> torch.Tensor:
        scores = head(maps)
        if shift is None:
            return 1e-6 * scores
        return (10 * scores - torch.tensor([0.0, 0, shift, 0, 0])).softmax(1)

    model.head = scaled  # type: ignore[method-assign]
    method = IntegratedGradients(steps=8)
    pieces, alone = (
        explain.attribute(model, X[:1].float(), method, target=2, batch_size=size).values
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
