"""A model without a finding: its pattern is projected out of a layer, or trained away, and the
result is measured."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from explain._utils.errors import LayerError, RunError, check_choice, keywords, option_name
from explain._utils.modules import submodule
from explain._utils.random_numbers import seeded
from explain.hooks import FeatureExtractor
from explain.hooks.preserve import untouched
from explain.insight.channels import Channel, feature_maps
from explain.insight.reattribution import BATCH, RunPhotos, in_parts
from explain.insight.repaired import Answers, Repair
from explain.insight.spurious_regions import Finding, PatternPhotos, pattern_of
from explain.layers.default_layer import stage_layers
from explain.targets.base import find_logits

Prior = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a model, inputs, classes ``(N,)`` and masks ``(N, 1, H, W)``, true where evidence may lie,
to a penalty."""
RANKS = (1, 4, 16)
STRENGTHS = (0.5, 0.75)  # that are tried beside 1
RIDGE = 1e-3  # of the mean variance of a layer's channels
CHECK_EVERY = 20  # steps of the training, after which its weights are tried


class _BatchRunner:
    """Runs the old or the repaired model on its device, and returns logarithms of class
    probabilities ``(N, K)``. The old model decides whether outputs are scores or probabilities."""

    def __init__(self, photos: RunPhotos, x: torch.Tensor) -> None:
        """Run the old model on ``x`` ``(N, C, H, W)`` once, to decide whether its outputs are
        scores or probabilities. ``self.place`` moves inputs to the model's device and type."""
        explainer = photos.explainer
        self.place = explainer.batch
        explainer.probabilities(explainer.batch(x))  # says what its outputs are
        self._outputs = explainer.outputs

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities ``(N, K)`` that a model gives any number of inputs ``(N, C,
        H, W)``: run in batches, without gradients, and returned on the CPU."""
        return in_parts(lambda part: self.log_probabilities(model, self.place(part)), x)

    def log_probabilities(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The logarithms of the probabilities ``(N, K)``, in float32, of one batch on the model's
        device. Gradients are kept, for training.
        """
        scores = find_logits(model(x), len(x)).float()
        are_probabilities = self._outputs.activation == "none"  # already: back to scores
        if are_probabilities and self._outputs.kind == "classes":
            scores = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
        elif are_probabilities and self._outputs.kind == "labels":
            scores = scores.logit(torch.finfo(scores.dtype).eps)
        return scores.log_softmax(1)  # of labels too, as a divergence needs what adds up to 1


@dataclass(frozen=True, eq=False)
class WantedAnswers:
    """Inputs ``x`` ``(N, C, H, W)`` and the log probabilities ``wanted`` ``(N, K)`` of the old
    model without the pattern. ``allowed`` ``(N, 1, H, W)`` is true where evidence may lie."""

    x: torch.Tensor
    wanted: torch.Tensor
    allowed: torch.Tensor

    def loss(self, scores: torch.Tensor) -> float:
        """The mean Kullback-Leibler divergence of a model's answers ``(N, K)``, logarithms of
        probabilities in the order of ``x``, from those wanted."""
        return float(F.kl_div(scores, self.wanted, log_target=True, reduction="batchmean"))


def _rest_of_class_repeated(pattern: PatternPhotos) -> torch.Tensor:
    """The inputs of photos of the finding's class without the pattern, repeated until they are
    about half as many as the photos of other classes; none where there are none."""
    times = max(1, round(len(pattern) / max(1, len(pattern.of_class)) / 2))
    return pattern.of_class.x.repeat(times, 1, 1, 1)


def _wanted_answers(
    pattern: PatternPhotos, model: nn.Module, run: _BatchRunner, seed: int
) -> WantedAnswers:
    """The inputs of a repair with the old ``model``'s answers without the pattern: photos of other
    classes with the pattern and as they are, the finding's, and others of its class (half as many).
    """
    exchanged = pattern.exchanged(seed)
    others_x = pattern.other_classes.x
    rest_of_class = _rest_of_class_repeated(pattern)
    # repeated until they are about half as many as the photos of other classes
    times = max(1, round(len(others_x) / len(pattern.of_finding) / 2))
    without = [pattern.without(seed + i) for i in range(times)]
    # the same four groups of photos in each of the three, in one order
    x = torch.cat(
        [exchanged.pasted, others_x, pattern.of_finding.x.repeat(times, 1, 1, 1), rest_of_class]
    )
    allowed = [
        ~exchanged.regions,
        torch.ones_like(others_x[:, :1], dtype=torch.bool),
        ~pattern.of_finding.regions.repeat(times, 1, 1, 1),
        torch.ones_like(rest_of_class[:, :1], dtype=torch.bool),
    ]
    without_pattern = torch.cat([exchanged.control, others_x, *without, rest_of_class])
    return WantedAnswers(x, wanted=run(model, without_pattern), allowed=torch.cat(allowed))


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What the pattern does to the C channels of a layer, in float64: directions ``patterns`` ``(C,
    P)``, the most changed first, and ``mean`` and ``covariance`` of channels without it."""

    patterns: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor

    def projection(self, rank: int, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrix ``(C, C)`` and offset that take out ``rank`` patterns by ``strength``, along
        filters of least variance without the pattern (Haufe 2014; P-ClArC 2022; LEACE 2023).
        """
        patterns = self.patterns[:, :rank]
        # the covariance alone may have no inverse, as with channels that are never active
        ridge = (
            RIDGE
            * self.covariance.diagonal().mean()
            * torch.eye(len(self.mean), dtype=self.mean.dtype)
        )
        filters = torch.linalg.solve(self.covariance + ridge, patterns)
        taken = strength * patterns @ torch.linalg.solve(patterns.T @ filters, filters.T)
        # x - taken @ (x - mean): channels that are as usual without the pattern stay
        matrix = torch.eye(len(taken), dtype=taken.dtype) - taken
        return matrix, taken @ self.mean


def _statistics(
    pattern: PatternPhotos, model: nn.Module, run: _BatchRunner, layer: str, seed: int
) -> LayerStatistics:
    """What the pattern does to a layer: the finding's concept vector, or else the left singular
    vectors of the summed difference of maps with and without the pattern; and mean and covariance
    of the channels, over all places of photos without it.
    """

    def maps(x: torch.Tensor) -> torch.Tensor:
        """The feature maps of a batch of inputs, float64 on the CPU, with P places in one
        dimension: ``(N, C, P)``."""
        return feature_maps(model, run.place(x), layer).double().cpu().flatten(2)

    exchanged = pattern.exchanged(seed)
    # of other classes (with another patch, as a seam is no pattern) and of the finding's own
    without_pattern = torch.cat([exchanged.control, _rest_of_class_repeated(pattern)])
    # sums, zero until the first batch tells the number of channels
    total = torch.zeros((), dtype=torch.float64)
    squares = torch.zeros((), dtype=torch.float64)
    count = 0
    for x in torch.split(without_pattern, BATCH):
        points = maps(x).transpose(0, 1).flatten(1)  # channels by places of all photos
        total = total + points.sum(1)
        squares = squares + points @ points.T
        count += points.shape[1]
    mean = total / count
    covariance = squares / count - mean[:, None] * mean
    if pattern.direction is not None:
        _, vector = pattern.direction
        return LayerStatistics(vector[:, None], mean, covariance)
    difference = torch.zeros((), dtype=torch.float64)
    for with_pattern, control in zip(
        torch.split(exchanged.pasted, BATCH), torch.split(exchanged.control, BATCH), strict=True
    ):
        difference = difference + (maps(with_pattern) - maps(control)).sum(0)
    directions = torch.linalg.svd(difference, full_matrices=False).U  # the most changed first
    return LayerStatistics(directions, mean, covariance)


def _inserted(
    model: nn.Module, layer: str, x: torch.Tensor, channels: int
) -> tuple[nn.Module, nn.Module]:
    """A copy of a model with a linear map of ``channels`` after a layer, and this map: a 1 × 1
    convolution or `nn.Linear`, random until `_set`. ``x`` is one input, for the output's shape.
    """
    output = FeatureExtractor(model, layer)(x)[layer]
    linear: nn.Module
    if isinstance(output, torch.Tensor) and output.ndim > 2 and output.shape[1] == channels:
        # by the number of dimensions behind images and channels
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[output.ndim - 3]
        linear = convolution(channels, channels, kernel_size=1)
    elif isinstance(output, torch.Tensor) and output.shape[-1] == channels:
        linear = nn.Linear(channels, channels)
    else:
        raise LayerError(
            f"layer {layer!r} must give one tensor with channels first or last; choose another"
        )
    new = copy.deepcopy(model)
    parent, _, name = layer.rpartition(".")
    setattr(
        submodule(new, parent),
        name,
        nn.Sequential(submodule(new, layer), linear.to(output).requires_grad_(False)),
    )
    return new.eval(), linear


def _set(linear: Any, projection: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write a projection, a matrix ``(C, C)`` and an offset ``(C,)``, into the linear map of
    `_inserted`."""
    matrix, offset = projection
    with torch.no_grad():
        linear.weight.copy_(matrix.reshape(linear.weight.shape))
        linear.bias.copy_(offset)


@dataclass(frozen=True)
class _ProjectionChoice:
    """The layer, the number of directions and the strength of a projection, with its loss on the
    photos to choose by."""

    loss: float
    layer: str
    rank: int
    strength: float


def _projected(
    model: nn.Module,
    layers: Sequence[str],
    fit_photos: PatternPhotos,
    choice: WantedAnswers,
    run: _BatchRunner,
    seed: int,
) -> tuple[nn.Module, _ProjectionChoice]:
    """The model with the best projection of the pattern: directions are measured on ``fit_photos``,
    then layer, `RANKS` and strength chosen by the loss on those of ``choice``, which are others.
    """
    best: tuple[_ProjectionChoice, nn.Module, nn.Module, LayerStatistics] | None = None
    for layer in layers:
        statistics = _statistics(fit_photos, model, run, layer, seed)
        one_input = run.place(fit_photos.other_classes.x[:1])
        new, linear = _inserted(model, layer, one_input, channels=len(statistics.mean))
        for rank in RANKS:
            if rank > statistics.patterns.shape[1]:  # and so are the following ones
                break
            _set(linear, statistics.projection(rank, strength=1.0))
            loss = choice.loss(run(new, choice.x))
            tried = _ProjectionChoice(loss=loss, layer=layer, rank=rank, strength=1.0)
            if best is None or tried.loss < best[0].loss:
                best = (tried, new, linear, statistics)
    assert best is not None  # there is at least one layer, and each has rank 1
    chosen, new, linear, statistics = best
    # weaker ones are tried with the best layer and rank only
    for strength in STRENGTHS:
        _set(linear, statistics.projection(chosen.rank, strength))
        weaker = replace(chosen, loss=choice.loss(run(new, choice.x)), strength=strength)
        chosen = min(chosen, weaker, key=lambda projection: projection.loss)
    _set(linear, statistics.projection(chosen.rank, chosen.strength))
    return new, chosen


def _trained(
    model: nn.Module,
    training_answers: WantedAnswers,
    choice_answers: WantedAnswers,
    run: _BatchRunner,
    seed: int,
    *,
    steps: int,
    rate: float,
    max_seconds: float,
    prior: Prior | None,
) -> nn.Module:
    """Train a copy to answer as without the pattern, for ``steps`` or ``max_seconds``; the best
    weights by ``choice_answers`` stay. ``prior`` penalises evidence in the pattern.
    """
    new = copy.deepcopy(model).eval()  # statistics of normalisations stay as they are
    parameters = list(new.parameters())
    required_grad = [parameter.requires_grad for parameter in parameters]
    optimiser = torch.optim.AdamW(
        [parameter.requires_grad_() for parameter in parameters], rate, weight_decay=0.0
    )
    generator = seeded(seed)
    end = time.monotonic() + max_seconds
    best_weights = copy.deepcopy(new.state_dict())
    least_loss = choice_answers.loss(run(new, choice_answers.x))
    for step in range(1, steps + 1):
        rows = torch.randint(len(training_answers.x), (BATCH,), generator=generator)
        x = run.place(training_answers.x[rows])
        scores = run.log_probabilities(new, x)
        wanted = training_answers.wanted[rows].to(scores)
        loss = F.kl_div(scores, wanted, log_target=True, reduction="batchmean")
        if prior is not None:
            # the last argument says where evidence may lie
            loss = loss + prior(new, x, wanted.argmax(1), training_answers.allowed[rows])
        optimiser.zero_grad()
        torch.autograd.backward(loss)  # `loss.backward()`, with types
        optimiser.step()
        is_over = step == steps or time.monotonic() > end
        if is_over or step % CHECK_EVERY == 0:
            loss_now = choice_answers.loss(run(new, choice_answers.x))
            if loss_now < least_loss:
                least_loss = loss_now
                best_weights = copy.deepcopy(new.state_dict())
        if is_over:
            break
    new.load_state_dict(best_weights)
    for parameter, required in zip(parameters, required_grad, strict=True):
        parameter.requires_grad_(required)
        parameter.grad = None
    return new


@keywords()
def repair(
    finding: Finding,
    photos: RunPhotos,
    *,
    how: str = "project",
    layer: str | Sequence[str] | None = None,
    most: int = 400,
    steps: int = 100,
    learning_rate: float = 3e-5,
    prior: Prior | None = None,
    max_seconds: float = 600.0,
    seed: int = 0,
) -> Repair:
    """Make a copy of a model that no longer reads a finding, and measure what that does to its
    answers.

    The pattern of the finding is a region of its photos. It is put on other photos, whose class it
    should not change, and taken off its own, by exchanging the pixels of the region. The repaired
    model should answer as the old one does without the pattern. Half of the photos serve to fit
    that, a quarter to choose, and a quarter to measure the result.

    Args:
        finding: a cluster of maps, such as ``insight.reasons[0]``; a class that looks away from its
            object, such as ``insight.looks[0]``; a channel (give ``layer``); or a concept vector
            from examples.
        photos: the photos of the run, and the model.
        how: "project" takes the pattern out of a layer, by a linear map of its channels that is
            inserted after it; layer, number of directions and strength are chosen. "train" trains
            all weights of a copy.
        layer: the layer, or several to choose from; None tries the last one of each resolution.
        most: how many other photos are used.
        steps, learning_rate, max_seconds: of the training, by AdamW in batches of 32 photos.
        prior: a penalty on evidence in the region of the pattern, for the training, such as
            ``explain.training.AttributionPrior("gradcam(relu=False)", "share")``.
        seed: of what is drawn at random.

    Raises:
        RunError: there are too few photos, or an argument is wrong.
        LayerError: there is no such layer, or none that gives a tensor of channels.

    Anders et al., "Finding and removing Clever Hans: using explanation methods to debug and improve
    deep models", Information Fusion 2022 (ClArC).
    """
    check_choice(option_name("how"), how, ("project", "train"), error=RunError)
    begun = time.monotonic()
    model = photos.explainer.model
    # a channel is a number at one layer; several are only tried for other findings
    channel_layer = layer if isinstance(layer, str) else None
    pattern = pattern_of(finding, photos, layer=channel_layer, most=most, seed=seed)
    fit_photos, choice_photos, test_photos = pattern.parts(seed)
    run = _BatchRunner(photos, pattern.other_classes.x[:BATCH])
    projection: _ProjectionChoice | None = None
    with untouched(model, grad=True):
        choice = _wanted_answers(choice_photos, model, run, seed)
        if how == "train":
            # two draws of what is pasted where: more to learn from than one
            fit_draws = [
                _wanted_answers(fit_photos, model, run, number) for number in (seed, seed + 1)
            ]
            new = _trained(
                model,
                _joined(fit_draws),
                choice,
                run,
                seed,
                steps=steps,
                rate=learning_rate,
                max_seconds=max_seconds,
                prior=prior,
            )
        else:
            layers = _layers(layer, pattern, model, run)
            new, projection = _projected(model, layers, fit_photos, choice, run, seed)
        answers = _answers(test_photos, model, new, run, seed)
        loss_before = choice.loss(run(model, choice.x))
        loss_after = choice.loss(run(new, choice.x))
    return Repair(
        model=new,
        finding=f"channel {finding.number}" if isinstance(finding, Channel) else finding.target,
        how=how,
        answers=answers,
        loss=(loss_before, loss_after),
        seconds=time.monotonic() - begun,
        target=pattern.target,
        layer=None if projection is None else projection.layer,
        rank=None if projection is None else projection.rank,
        strength=None if projection is None else projection.strength,
        seed=seed,
        pattern=test_photos,
        photos=photos,
    )


def _joined(parts: Sequence[WantedAnswers]) -> WantedAnswers:
    """Join sets of wanted answers one after the other."""
    names = [column.name for column in fields(WantedAnswers)]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return WantedAnswers(**joined)


def _layers(
    layer: str | Sequence[str] | None, pattern: PatternPhotos, model: nn.Module, run: _BatchRunner
) -> Sequence[str]:
    """The names of the layers that a projection is tried at: that of a concept vector, those that
    the caller named, or the last one of each resolution.
    """
    if pattern.direction is not None:
        layer_of_vector, _ = pattern.direction
        return [layer_of_vector]
    if isinstance(layer, str):
        return [layer]
    if layer is None:
        layer = [
            name
            for name in stage_layers(model, run.place(pattern.other_classes.x[:1]))
            if "@" not in name  # a single call: what is inserted would act on all of its module
        ]
    if not layer:
        raise LayerError(
            f"{option_name('layer')} must name a layer of this model, got none; give one"
        )
    return layer


def _answers(
    photos: PatternPhotos, model: nn.Module, new: nn.Module, run: _BatchRunner, seed: int
) -> dict[str, Answers]:
    """The predictions of the old and the ``new`` model for each group of photos that neither fitted
    nor chose, by `explain.insight.repaired.GROUPS`, in their order, without empty ones.
    """
    exchanged = photos.exchanged(seed)
    groups = {
        "marked": (photos.of_finding.x, photos.of_finding.classes),
        "without": (photos.without(seed), photos.of_finding.classes),
        "moved": (exchanged.pasted, photos.other_classes.classes),
        "control": (exchanged.control, photos.other_classes.classes),
        "own": (photos.of_class.x, photos.of_class.classes),
        "elsewhere": (photos.other_classes.x, photos.other_classes.classes),
    }
    answers = {}
    for name, (x, classes) in groups.items():
        if len(x):
            predictions = [run(network, x).argmax(1) for network in (model, new)]
            answers[name] = Answers(classes, torch.stack(predictions, 1))
    return answers
