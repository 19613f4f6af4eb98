"""A model without a finding: its mark is projected out of a layer, or trained away, and the result is measured.

What a repair did: answers before and after, and a page with the mark, the accuracies and the maps in pictures.
"""

import copy
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, LayerError, RunError, keywords, muted, option
from explain.attribution.api import attribute
from explain.data.boxes import Box
from explain.data.files import Files
from explain.hooks import FeatureExtractor
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import submodule
from explain.insight.ablation import sign_test
from explain.insight.channels import Channel, feature_maps
from explain.insight.maps import aligned, fields_of, heated, percent
from explain.insight.marks import Finding, MarkedPhotos, marked_photos
from explain.insight.reattribution import RunPhotos, method_in
from explain.layers.default_layer import stage_layers
from explain.render.sheets import Group, Layout, Tile, as_picture, empty, sheet
from explain.report.pages import Section, document
from explain.store.reading import Row
from explain.targets import TopClass
from explain.targets.base import find_logits
from explain.targets.labels import class_label

SHOWN = 3  # photos of each kind
SIDE = 180
EDGE = (230, 60, 20)
GROUPS = {
    "marked": "photos of the finding", "without": "the same without the mark", "moved": "other photos with the mark",
    "control": "other photos with another patch", "own": "photos of the class as they are",
    "elsewhere": "other photos as they are",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Answers:
    """What the models before and after said of some photos: their classes ``(N,)`` and both answers ``(N, 2)``."""

    classes: torch.Tensor
    given: torch.Tensor

    @property
    def accuracy(self) -> tuple[float, float]:
        return self.share(self.classes[:, None])

    def share(self, target: int | torch.Tensor) -> tuple[float, float]:
        """The shares of answers that are this class, or each photo's of these."""
        before, after = (self.given == target).double().mean(0).tolist()
        return before, after


@dataclass(frozen=True, eq=False)
class Repair:
    """A model without a finding, and what the repair did to its answers.

    ``model`` is a copy; the explainer's own model is as it was. ``answers`` has those of photos that were used neither
    to fit nor to choose: "marked" (photos of the finding), "without" (the same without the mark), "moved" (photos of
    other classes with the mark), "control" (the same with a patch of another photo), "own" (photos of the class without
    the mark, if the finding has some) and "elsewhere" (photos of other classes as they are). ``layer``, ``rank`` and
    ``strength`` are those of the projection; ``loss`` is what they were chosen by: how far the answers are from those
    of the old model without the mark (mean Kullback-Leibler divergence), before and after.
    """

    model: nn.Module = field(repr=False)
    finding: str
    how: str
    answers: Mapping[str, Answers] = field(repr=False)
    loss: tuple[float, float]
    seconds: float
    target: int | None
    layer: str | None
    rank: int | None
    strength: float | None
    seed: int
    marks: MarkedPhotos = field(repr=False)
    photos: RunPhotos = field(repr=False)

    @property
    def taken(self) -> tuple[float, float, float]:
        """The share of other photos that get the class of the finding: with its mark before and after, and without."""
        if self.target is None:
            return float("nan"), float("nan"), float("nan")
        return *self.answers["moved"].share(self.target), self.answers["control"].share(self.target)[0]

    @property
    def chance(self) -> float:
        """How likely it is that the mark of a class without effect draws as many photos to it (McNemar's test).

        Above 0.05, it was not shown that the old model reads the mark: there may be nothing to repair.
        """
        if self.target is None:
            return float("nan")
        moved, control = (self.answers[name].given[:, 0] == self.target for name in ("moved", "control"))
        return sign_test(int((moved & ~control).sum()), int((control & ~moved).sum()))

    @property
    def rows(self) -> list[list[str]]:
        """The table of accuracies, with its heading."""
        found = [["accuracy", "photos", "before", "after"]]
        for name, each in self.answers.items():
            found.append([GROUPS[name], str(len(each.classes)), *map(percent, each.accuracy)])
        return found

    def to_dict(self) -> dict[str, Any]:
        accuracy = {name: {"photos": len(each.classes), "before": each.accuracy[0], "after": each.accuracy[1]}
                    for name, each in self.answers.items()}  # fmt: skip
        return {**fields_of(self, "finding how layer rank strength loss taken chance seconds"), "accuracy": accuracy}

    @property
    def about(self) -> str:
        """What was done, and whether there was something to repair, in two sentences."""
        if self.how == "train":
            done = "The model was trained to answer as it did without the mark"
        else:
            directions = "1 direction" if self.rank == 1 else f"{self.rank} directions"
            done = f"{directions} of {self.layer} taken out, strength {self.strength:g}"
        if self.target is None:
            return f"{done}."
        before, after, control = map(percent, self.taken)
        doubt = " It is not shown that the model reads the mark at all." * (self.chance >= 0.05)
        moved = f"With the mark, {before} of other photos were taken for {self.finding}, now {after}"
        return f"{done}. {moved}; with another patch, {control} (p = {self.chance:.2g}).{doubt}"

    def __str__(self) -> str:
        return "\n".join([f"{self.finding}: {self.about}", *aligned(self.rows)])

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> list[Path]:
        """Write the model, and beside it a page with the proof; return both paths.

        Args:
            path: "repaired.pt" for the whole module (``torch.load(path, weights_only=False)``, which needs the code of
                the original model, but not this package); "repaired.pt2" for an exported program, which needs no code
                but torch (``torch.export.load(path).module()``). The page is ``repaired.html``.
            overwrite: replace files that are there.

        Raises:
            OutputError: they cannot be written.
        """
        path, buffer = Path(path), io.BytesIO()
        if path.suffix == ".pt2":
            x = self.photos.explainer._placed(self.marks.hosts.x[:2])
            batch = {0: torch.export.Dim("batch")}
            torch.export.save(torch.export.export(self.model, (x,), dynamic_shapes=(batch,)), buffer)
        else:
            torch.save(self.model, buffer)
        files = Files(path.parent, overwrite=overwrite)
        files.add_bytes(path.name, buffer.getvalue())
        files.add_text(f"{path.stem}.html", self.to_html())
        return files.write()

    def to_html(self) -> str:
        """The page: what the mark is, what the repair did to the answers, and to the maps.

        Photos that are tensors, or gone, are left out.
        """
        told = f"{self.about}\nAccuracies on photos that were not used to fit or choose it."
        sections = [Section("The answers", told, self.rows, [(bars(self), "Accuracies before and after the repair")])]
        for place, heading, about, draw in (
            (0, "The mark", "Photos of the finding, and other photos that were given the region in the frame. The "
             "class of these should not change.", marks),
            (2, "The maps", "What the old and the new model read their top class from.", maps),
        ):  # fmt: skip
            try:
                pictures = [(draw(self), heading)]
            except ExplainError as error:  # of photos that are tensors, or gone
                about, pictures = f"{about}\nThere is no picture: {error}", []
            sections.insert(place, Section(heading, about, pictures=pictures))
        done = "by training" if self.how == "train" else "by a projection"
        detail = f"{self.photos.run.path.name}, {self.seconds:.0f} s"
        return document(f"{self.finding}: repaired {done}", detail, sections)


def marks(repair: Repair) -> Image.Image:
    """Photos of the finding with the region of the mark, and others that were given it."""
    own = [Tile(_framed(_seen(repair, row), region), row.label or "") for row, region in _own(repair)]
    moved = [Tile(_framed(photo, region), row.label or "") for row, photo, region, _ in _moved(repair)]
    return _sheet(f"photos of the finding ({repair.finding})", own, moved)


def bars(repair: Repair) -> Image.Image:
    """The accuracies before and after, on each kind of photos."""
    count = len(repair.answers)
    figure = empty((6.4, 0.7 + 0.45 * count), "Bars of the accuracies before and after the repair")
    axes = figure.subplots()
    for number, (label, colour) in enumerate((("before", "#b0b7c3"), ("after", "#2f6fb5"))):
        lengths = [100 * each.accuracy[number] for each in repair.answers.values()]
        drawn = axes.barh([row + 0.4 * number - 0.2 for row in range(count)], lengths, 0.36, label=label, color=colour)
        axes.bar_label(drawn, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set(
        yticks=range(count), yticklabels=[GROUPS[name] for name in repair.answers], xlim=(0, 100), xlabel="accuracy (%)"
    )
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return as_picture(figure)


def maps(repair: Repair) -> Image.Image:
    """What both models read their top class from, in photos of the finding and in others with its mark."""
    explainer, run = repair.photos.explainer, repair.photos.run
    method = method_in(run, run.methods[0])
    cases = [(row, _seen(repair, row), repair.marks.carriers.x[i]) for i, (row, _) in enumerate(_own(repair))]
    cases += [(row, photo, x) for row, photo, _, x in _moved(repair)]
    tiles = []
    for row, photo, x in cases:
        for name, model in (("before", explainer.model), ("after", repair.model)):
            with muted():
                found = attribute(model, explainer._placed(x[None]), method, target=TopClass())
            picture = heated(photo, found.heatmap[0], Box(0, 0, *map(float, photo.size)), found.style)
            answer = class_label(explainer.categories, int(found.target[0]))
            tiles.append(Tile(picture, f"{name}: {answer}", f"label: {row.label}" if row.label else ""))
    middle = 2 * min(SHOWN, len(repair.marks.carriers))
    return _sheet("photos of the finding", tiles[:middle], tiles[middle:])


def _sheet(title: str, own: Sequence[Tile], moved: Sequence[Tile]) -> Image.Image:
    return sheet(Layout("", "", (Group(title, tuple(own)), Group("others with its mark", tuple(moved)))), SIDE)


def _own(repair: Repair) -> list[tuple[Row, torch.Tensor]]:
    carriers = repair.marks.carriers
    return list(zip(carriers.rows, carriers.regions, strict=True))[:SHOWN]


def _moved(repair: Repair) -> list[tuple[Row, Image.Image, torch.Tensor, torch.Tensor]]:
    """Some hosts with the mark: the row, the photo, the region, and the input. Those that changed come first."""
    donors, _, regions = repair.marks.donors(repair.seed)
    x = repair.marks.pairs(repair.seed)[0]
    given = repair.answers["moved"].given
    order = (given[:, 0] == given[:, 1]).int().argsort(stable=True)[:SHOWN].tolist()
    found = []
    for i in order:
        row, region = repair.marks.hosts.rows[i], regions[i]
        host, donor = (np.asarray(_seen(repair, each)) for each in (row, repair.marks.carriers.rows[int(donors[i])]))
        mask = region[0, :, :, None].numpy()
        found.append((row, Image.fromarray(np.where(mask, donor, host)), region, x[i]))
    return found


def _seen(repair: Repair, row: Row) -> Image.Image:
    """The part of a photo that the model saw, in the size of its input."""
    height, width = row.input_size
    left, top, right, bottom = map(round, (row.box.left, row.box.top, row.box.right, row.box.bottom))
    return repair.photos.picture(row).convert("RGB").crop((left, top, right, bottom)).resize((width, height))


def _framed(photo: Image.Image, region: torch.Tensor) -> Image.Image:
    """A photo with the edge of a region ``(1, H, W)`` drawn in it."""
    scale = max(1, SIDE // max(photo.size))
    large = np.asarray(photo.resize((photo.width * scale, photo.height * scale), Image.Resampling.NEAREST)).copy()
    inside = region[0].repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    core = -F.max_pool2d(-F.pad(inside[None, None].float(), (1, 1, 1, 1)), 3, 1)[0, 0] > 0
    large[(inside & ~core).numpy()] = EDGE
    return Image.fromarray(large)


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
