"""A model without a finding: its mark is projected out of a layer, or trained away, and the result is measured."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from explain._utils.errors import LayerError, RunError, keywords, option
from explain.hooks import FeatureExtractor
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import submodule
from explain.insight.channels import Channel, feature_maps
from explain.insight.marks import Finding, MarkedPhotos, marked_photos
from explain.insight.reattribution import RunPhotos
from explain.insight.repaired import Answers, Repair
from explain.layers.default_layer import stage_layers
from explain.targets.base import find_logits

Prior = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a model, inputs, classes ``(N,)`` and masks ``(N, 1, H, W)``, true where evidence may lie, to a penalty."""
BATCH = 32
RANKS = (1, 4, 16)
STRENGTHS = (0.5, 0.75)  # that are tried beside 1
RIDGE = 1e-3  # of the mean variance of a layer's channels
CHECK_EVERY = 20


def _scores(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return find_logits(model(x), len(x)).float().log_softmax(1)


class _BatchRunner:
    """Runs models on their device, in batches and without gradients, and returns logarithms of probabilities."""

    def __init__(self, photos: RunPhotos) -> None:
        self.place = photos.explainer._placed

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([_scores(model, self.place(each)).cpu() for each in torch.split(x, BATCH)])


@dataclass(frozen=True, eq=False)
class _Task:
    """Inputs, and what the old model says of them without the mark: the answers that a repaired model should give.

    ``unmarked`` ``(N, 1, H, W)`` is true where evidence may lie: everywhere but in the mark.
    """

    x: torch.Tensor
    wanted: torch.Tensor
    unmarked: torch.Tensor

    def loss(self, scores: torch.Tensor) -> float:
        return float(F.kl_div(scores, self.wanted, log_target=True, reduction="batchmean"))


def _own_repeated(marks: MarkedPhotos) -> list[torch.Tensor]:
    """Others of the class, so many times that they are about half as many as the photos of other classes."""
    return [marks.own.x] * max(1, round(len(marks) / max(1, len(marks.own)) / 2))


def _task(marks: MarkedPhotos, model: nn.Module, run: _BatchRunner, seed: int) -> _Task:
    """Other photos with the mark and as they are, photos of the finding, and others of its class: half as many each."""
    marked, control = marks.pairs(seed)
    times = max(1, round(len(marks) / len(marks.carriers) / 2))
    carriers = [(marks.carriers.x, marks.without(seed + i)) for i in range(times)]
    own = _own_repeated(marks)
    x = torch.cat([marked, marks.hosts.x, *(x for x, _ in carriers), *own])
    wanted = run(model, torch.cat([control, marks.hosts.x, *(x for _, x in carriers), *own]))
    unmarked = torch.ones_like(x[:, :1], dtype=torch.bool)
    unmarked[: len(marked)] = ~marks.donors(seed)[2]
    unmarked[2 * len(marked) :][: times * len(marks.carriers)] = ~marks.carriers.regions.repeat(times, 1, 1, 1)
    return _Task(x, wanted, unmarked)


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What the mark does to a layer ``(C, P)``, the first directions first; and mean and covariance without it."""

    patterns: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor

    def projection(self, rank: int, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrix ``(C, C)`` and offset ``(C,)`` that take the first directions out, and change all else least.

        The filters that measure a direction are those with the least variance over photos without the mark (Haufe et
        al., NeuroImage 2014): its part beyond the mean is taken out (P-ClArC, Anders et al., 2022; least change as in
        LEACE, Belrose et al., NeurIPS 2023).
        """
        patterns = self.patterns[:, :rank]
        ridge = RIDGE * self.covariance.diagonal().mean() * torch.eye(len(self.mean), dtype=self.mean.dtype)
        filters = torch.linalg.solve(self.covariance + ridge, patterns)
        taken = strength * patterns @ torch.linalg.solve(patterns.T @ filters, filters.T)
        return torch.eye(len(taken), dtype=taken.dtype) - taken, taken @ self.mean


def _statistics(marks: MarkedPhotos, model: nn.Module, run: _BatchRunner, layer: str, seed: int) -> LayerStatistics:
    marked, control = marks.pairs(seed)
    difference = mean = second = torch.zeros((), dtype=torch.float64)
    count = 0
    for with_mark, without in zip(torch.split(marked, BATCH), torch.split(control, BATCH), strict=True):
        maps = [feature_maps(model, run.place(x), layer).double().cpu().flatten(2) for x in (with_mark, without)]
        difference = difference + (maps[0] - maps[1]).sum(0)
    for x in torch.split(torch.cat([control, *_own_repeated(marks)]), BATCH):
        points = feature_maps(model, run.place(x), layer).double().cpu().transpose(0, 1).flatten(1)
        mean, second, count = mean + points.sum(1), second + points @ points.T, count + points.shape[1]
    mean = mean / count
    direction = marks.direction
    patterns = torch.linalg.svd(difference, full_matrices=False)[0] if direction is None else direction[1][:, None]
    return LayerStatistics(patterns, mean, second / count - mean[:, None] * mean)


def _inserted(model: nn.Module, layer: str, x: torch.Tensor, channels: int) -> tuple[nn.Module, nn.Module]:
    """A copy of a model with a linear map of the channels after a layer; and this map."""
    output = FeatureExtractor(model, layer)(x)[layer]
    made: nn.Module
    if isinstance(output, torch.Tensor) and output.ndim > 2 and output.shape[1] == channels:
        made = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[output.ndim - 3](channels, channels, 1)
    elif isinstance(output, torch.Tensor) and output.shape[-1] == channels:
        made = nn.Linear(channels, channels)
    else:
        raise LayerError(f"layer {layer!r} must give one tensor with channels first or last; choose another")
    new = copy.deepcopy(model)
    parent, _, name = layer.rpartition(".")
    setattr(submodule(new, parent), name, nn.Sequential(submodule(new, layer), made.to(output).requires_grad_(False)))
    return new.eval(), made


def _set(made: Any, matrix: torch.Tensor, offset: torch.Tensor) -> None:
    with torch.no_grad():
        made.weight.copy_(matrix.reshape(made.weight.shape))
        made.bias.copy_(offset)


def _projected(
    model: nn.Module, layers: Sequence[str], fit: MarkedPhotos, choose: _Task, run: _BatchRunner, seed: int
) -> tuple[nn.Module, tuple[str, int, float]]:
    """The model with the projection of least loss on the photos to choose by, and its layer, rank and strength."""
    tried: list[tuple[float, str, int, float]] = []
    for layer in layers:
        found = _statistics(fit, model, run, layer, seed)
        new, made = _inserted(model, layer, run.place(fit.hosts.x[:1]), len(found.mean))
        losses = {}
        for rank in [each for each in RANKS if each <= found.patterns.shape[1]]:
            _set(made, *found.projection(rank, 1.0))
            losses[rank] = choose.loss(run(new, choose.x))
        rank = min(losses, key=losses.__getitem__)
        tried.append((losses[rank], layer, rank, 1.0))
        if losses[rank] == min(tried)[0]:
            best = new, made, found
    loss, layer, rank, strength = min(tried)
    new, made, found = best
    for each in STRENGTHS:
        _set(made, *found.projection(rank, each))
        loss, strength = min((loss, strength), (choose.loss(run(new, choose.x)), each))
    _set(made, *found.projection(rank, strength))
    return new, (layer, rank, strength)


def _trained(
    model: nn.Module, fit: _Task, choose: _Task, run: _BatchRunner, seed: int, steps: int, rate: float,
    max_seconds: float, prior: Prior | None,
) -> nn.Module:  # fmt: skip
    """A copy of the model, trained to answer as the model itself does without the mark; the best of the checks."""
    new = copy.deepcopy(model).eval()  # statistics of normalisations stay as they are
    flags = [each.requires_grad for each in new.parameters()]
    optimiser = torch.optim.AdamW([each.requires_grad_() for each in new.parameters()], rate, weight_decay=0.0)
    generator, end = torch.Generator().manual_seed(seed), time.monotonic() + max_seconds
    best, least = copy.deepcopy(new.state_dict()), choose.loss(run(new, choose.x))
    for step in range(1, steps + 1):
        rows = torch.randint(len(fit.x), (BATCH,), generator=generator)
        x = run.place(fit.x[rows])
        scores = _scores(new, x)
        wanted = fit.wanted[rows].to(scores)
        loss = F.kl_div(scores, wanted, log_target=True, reduction="batchmean")
        if prior is not None:
            loss = loss + prior(new, x, wanted.argmax(1), fit.unmarked[rows])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        over = time.monotonic() > end
        if step % CHECK_EVERY == 0 or step == steps or over:
            now = choose.loss(run(new, choose.x))
            if now < least:
                best, least = copy.deepcopy(new.state_dict()), now
        if over:
            break
    new.load_state_dict(best)
    for each, flag in zip(new.parameters(), flags, strict=True):
        each.requires_grad_(flag)
        each.grad = None
    return new


@keywords()
def repair(
    finding: Finding, photos: RunPhotos, *, how: str = "project", layer: str | Sequence[str] | None = None,
    most: int = 400, steps: int = 100, learning_rate: float = 3e-5, prior: Prior | None = None,
    max_seconds: float = 600.0, seed: int = 0,
) -> Repair:  # fmt: skip
    """Make a model without a finding, and measure what that does.

    The mark of the finding is a region of its photos. It is put on other photos, whose class it should not change, and
    taken off its own, by exchanging the pixels of the region. The repaired model should answer as the old one does
    without the mark. Half of the photos serve to fit that, a quarter to choose, and a quarter to measure the result.

    Args:
        finding: a cluster of maps, such as ``insight.reasons[0]``; a class that looks away from its object, such as
            ``insight.looks[0]``; a channel (give ``layer``); or a concept vector from examples.
        photos: the photos of the run, and the model.
        how: "project" takes the mark out of a layer, by a linear map of its channels that is inserted after it; layer,
            number of directions and strength are chosen. "train" trains all weights of a copy.
        layer: the layer, or several to choose from; None tries the last one of each resolution.
        most: how many other photos are used.
        steps, learning_rate, max_seconds: of the training, by AdamW in batches of 32 photos.
        prior: a penalty on evidence in the region of the mark, for the training, such as
            ``explain.training.AttributionPrior("gradcam(relu=False)", "share")``.
        seed: of what is drawn at random.

    Raises:
        RunError: there are too few photos, or an argument is wrong.
        LayerError: there is no such layer, or none that gives a tensor of channels.

    Anders et al., "Finding and removing Clever Hans: using explanation methods to debug and improve deep models",
    Information Fusion 2022 (ClArC).
    """
    if how not in ("project", "train"):
        raise RunError(f"{option('how')} must be 'project' or 'train', got {how!r}; project needs no training")
    begun, model, run = time.monotonic(), photos.explainer.model, _BatchRunner(photos)
    one = layer if layer is None or isinstance(layer, str) else None
    marks = marked_photos(finding, photos, layer=one, most=most, seed=seed)
    fit, choose, prove = marks.parts(seed)
    with untouched(model, grad=True):
        wanted = _task(choose, model, run, seed)
        if how == "train":
            bank = [_task(fit, model, run, seed + i) for i in range(2)]
            joined = _Task(*(torch.cat([getattr(each, f.name) for each in bank]) for f in fields(_Task)))
            new = _trained(model, joined, wanted, run, seed, steps, learning_rate, max_seconds, prior)
            at: tuple[str | None, int | None, float | None] = (None, None, None)
        else:
            named = layer if marks.direction is None else marks.direction[0]
            layers: Sequence[str] = [named] if isinstance(named, str) else named or ()
            if named is None:
                layers = [each for each in stage_layers(model, run.place(marks.hosts.x[:1])) if "@" not in each]
            if not layers:
                raise LayerError(f"{option('layer')} must name a layer of this model, got none; give one")
            new, at = _projected(model, layers, fit, wanted, run, seed)
        moved, control = prove.pairs(seed)
        own, hosts = prove.carriers, prove.hosts
        shown = {
            "marked": (own.x, own.classes), "without": (prove.without(seed), own.classes),
            "moved": (moved, hosts.classes), "control": (control, hosts.classes),
            "own": (prove.own.x, prove.own.classes), "elsewhere": (hosts.x, hosts.classes),
        }  # fmt: skip
        both = {name: [run(each, x).argmax(1) for each in (model, new)] for name, (x, _) in shown.items() if len(x)}
        answers = {name: Answers(shown[name][1], torch.stack(given, 1)) for name, given in both.items()}
        loss = (wanted.loss(run(model, wanted.x)), wanted.loss(run(new, wanted.x)))
    what = f"channel {finding.number}" if isinstance(finding, Channel) else finding.target
    return Repair(new, what, how, answers, loss, time.monotonic() - begun, marks.target, *at, seed, prove, photos)
