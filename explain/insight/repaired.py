"""What a repair did: answers before and after, and a page with the pattern, the accuracies and the
maps in pictures."""

import io
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, muted
from explain.attribution.api import attribute
from explain.attribution.pictures import Scene
from explain.data.boxes import Box
from explain.data.files import Files
from explain.insight.ablation import sign_test
from explain.insight.maps import fields_of, in_percent, table_lines
from explain.insight.reattribution import RunPhotos, method_in
from explain.insight.spurious_regions import PatternPhotos
from explain.render.figures import as_picture, empty
from explain.render.sheets import Group, Layout, Tile, contact_sheet
from explain.render.styles import Contour, get_style
from explain.report.pages import Section, document
from explain.store.reading import Row
from explain.targets import TopClass
from explain.targets.labels import class_label

SHOWN = 3  # photos of each kind that are drawn
SIDE = 180  # pixels of a photo in a picture
GROUPS = {
    "marked": "photos of the finding",
    "without": "the same without the pattern",
    "moved": "other photos with the pattern",
    "control": "other photos with another patch",
    "own": "photos of the class as they are",
    "elsewhere": "other photos as they are",
}


@dataclass(frozen=True, eq=False)
class Answers:
    """The classes ``(N,)`` of some photos, and ``predictions`` ``(N, 2)``: the classes that the
    model gave before the repair and after it."""

    classes: torch.Tensor
    predictions: torch.Tensor

    @property
    def accuracy(self) -> tuple[float, float]:
        """The shares of predictions that are the classes of the photos, before and after the
        repair."""
        return self.share(self.classes[:, None])

    def share(self, target: int | torch.Tensor) -> tuple[float, float]:
        """The shares of predictions, before and after the repair, that are the class ``target``:
        one for all photos, or ``(N, 1)`` with one for each."""
        old, new = (self.predictions == target).double().mean(0).tolist()
        return old, new


@dataclass(frozen=True, eq=False)
class Repair:
    """A model without a finding (a copy), and what the repair did to its answers to photos that
    were used neither to fit nor to choose."""

    model: nn.Module = field(repr=False)
    finding: str
    how: str
    # "marked" (photos of the finding), "without" (the same without the pattern), "moved" (other
    # classes with the pattern), "control" (other classes with a patch of another photo), "own" (the
    # class without the pattern, if there are some), "elsewhere" (other classes as they are)
    answers: Mapping[str, Answers] = field(repr=False)
    # mean Kullback-Leibler divergence from the old model's answers without the pattern, before and
    # after
    loss: tuple[float, float]
    seconds: float
    target: int | None
    # of the projection, chosen by ``loss``
    layer: str | None
    rank: int | None
    strength: float | None
    seed: int
    pattern: PatternPhotos = field(repr=False)
    photos: RunPhotos = field(repr=False)

    @property
    def taken(self) -> tuple[float, float, float]:
        """The shares of photos of other classes taken for the finding's class: with its pattern
        before and after the repair, with another patch before it. NaN where the finding has no
        class."""
        if self.target is None:
            return math.nan, math.nan, math.nan
        old, new = self.answers["moved"].share(self.target)
        control, _ = self.answers["control"].share(self.target)
        return old, new, control

    @property
    def chance(self) -> float:
        """McNemar's p-value that a pattern without effect draws so many more photos than another
        patch, for the old model; NaN where the finding has no class."""
        if self.target is None:
            return math.nan
        moved, control = (
            self.answers[name].predictions[:, 0] == self.target for name in ("moved", "control")
        )
        # above 0.05, there may be nothing to repair
        return sign_test(moved, control)

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the table of accuracies, with its head."""
        table = [["accuracy", "photos", "before", "after"]]
        for name, answers in self.answers.items():
            old, new = answers.accuracy
            table.append(
                [GROUPS[name], str(len(answers.classes)), in_percent(old), in_percent(new)]
            )
        return table

    def to_dict(self) -> dict[str, Any]:
        """The figures of a repair in plain values of JSON, for ``--json`` of the command line;
        "accuracy" has those of each group of photos in `GROUPS`."""
        accuracy = {}
        for name, answers in self.answers.items():
            old, new = answers.accuracy
            accuracy[name] = {"photos": len(answers.classes), "before": old, "after": new}
        return {
            **fields_of(self, "finding how layer rank strength loss taken chance seconds"),
            "accuracy": accuracy,
        }

    @property
    def summary(self) -> str:
        """What was done, and whether there was something to repair, in two sentences."""
        if self.how == "train":
            done = "The model was trained to answer as it did without the pattern"
        else:
            directions = "1 direction" if self.rank == 1 else f"{self.rank} directions"
            done = f"{directions} of {self.layer} taken out, strength {self.strength:g}"
        if self.target is None:
            return f"{done}."
        old, new, control = map(in_percent, self.taken)
        doubt = ""
        if self.chance >= 0.05:  # no more photos than another patch draws
            doubt = " It is not shown that the model reads the pattern at all."
        moved = f"With the pattern, {old} of other photos were taken for {self.finding}, now {new}"
        return f"{done}. {moved}; with another patch, {control} (p = {self.chance:.2g}).{doubt}"

    def __str__(self) -> str:
        """The repair as lines for the terminal: a summary, and the table of accuracies."""
        return "\n".join([f"{self.finding}: {self.summary}", *table_lines(self.rows)])

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> list[Path]:
        """Write the model, and beside it a page with the proof; return both paths.

        Args:
            path: "repaired.pt" for the whole module (``torch.load(path, weights_only=False)``,
                which needs the code of the original model, but not this package); "repaired.pt2"
                for an exported program, which needs no code but torch
                (``torch.export.load(path).module()``). The page is ``repaired.html``.
            overwrite: replace files that are there.

        Raises:
            OutputError: they cannot be written.
        """
        path = Path(path)
        buffer = io.BytesIO()
        if path.suffix == ".pt2":
            # two, as torch.export takes the size of a batch of one for fixed
            x = self.photos.explainer.batch(self.pattern.other_classes.x[:2])
            batch = {0: torch.export.Dim("batch")}
            torch.export.save(
                torch.export.export(self.model, (x,), dynamic_shapes=(batch,)), buffer
            )
        else:
            torch.save(self.model, buffer)
        files = Files(path.parent, overwrite=overwrite)
        files.add_bytes(path.name, buffer.getvalue())
        files.add_text(f"{path.stem}.html", self.to_html())
        return files.write()

    def to_html(self) -> str:
        """Return the page of a repair as HTML: what the pattern is, what the repair did to the
        answers, and to the maps. Photos that are tensors, or gone, are left out.
        """
        of_pattern = (
            "Photos of the finding, and other photos that were given the region in the frame. The "
            "class of these should not change."
        )
        of_answers = f"{self.summary}\nAccuracies on photos that were not used to fit or choose it."
        chart = (bars(self), "Accuracies before and after the repair")
        sections = [
            self._section("The pattern", of_pattern, draw_regions),
            Section("The answers", of_answers, self.rows, [chart]),
            self._section(
                "The maps", "What the old and the new model read their top class from.", draw_maps
            ),
        ]
        done = "by training" if self.how == "train" else "by a projection"
        detail = f"{self.photos.run.path.name}, {self.seconds:.0f} s"
        return document(f"{self.finding}: repaired {done}", detail, sections)

    def _section(
        self, heading: str, content: str, draw: Callable[["Repair"], Image.Image]
    ) -> Section:
        """A section of the page with the picture that ``draw`` makes; without a picture, where the
        photos are tensors or gone."""
        try:
            return Section(heading, content, pictures=[(draw(self), heading)])
        except ExplainError as error:  # of photos that are tensors, or gone
            return Section(heading, f"{content}\nThere is no picture: {error}")


@dataclass(frozen=True, eq=False)
class _Case:
    """A photo to draw, cropped as the model saw it, perhaps with the pattern pasted into ``region``
    ``(1, H, W)``; ``x`` ``(C, H, W)`` is the input."""

    row: Row
    photo: Image.Image
    region: torch.Tensor
    x: torch.Tensor


def draw_regions(repair: Repair) -> Image.Image:
    """Draw the pattern: the frame of its region in photos of the finding, and in other photos that
    were given it."""

    def tiles(case: _Case) -> list[Tile]:
        """The photo of a case with the frame of the region, and its label."""
        return [Tile(_framed(case.photo, case.region), case.row.label or "")]

    return _sheet(f"photos of the finding ({repair.finding})", repair, tiles)


def draw_maps(repair: Repair) -> Image.Image:
    """Draw which pixels the old and the repaired model read their top class from, in photos of the
    finding and in others with its pattern; by the first method of the run."""
    explainer = repair.photos.explainer
    run = repair.photos.run
    method = method_in(run, run.methods[0])

    def tiles(case: _Case) -> list[Tile]:
        """The maps of a case before and after the repair, with the class that each model gives."""
        model_tiles = []
        whole = Box.whole(case.photo.size)
        scene = Scene(case.photo, box=whole, seen=(whole,))
        for name, model in (("before", explainer.model), ("after", repair.model)):
            with muted():
                x = explainer.batch(case.x[None])
                attribution = attribute(model, x, method, target=TopClass())
            picture = scene.overlay(attribution, get_style(attribution.style))
            answer = class_label(explainer.categories, int(attribution.target[0]))
            label = f"label: {case.row.label}" if case.row.label else ""
            model_tiles.append(Tile(picture, f"{name}: {answer}", label))
        return model_tiles

    return _sheet("photos of the finding", repair, tiles)


def bars(repair: Repair) -> Image.Image:
    """Draw a bar chart of the accuracies before and after the repair, with a pair of bars for each
    group of photos in `GROUPS`."""
    count = len(repair.answers)
    figure = empty((6.4, 0.7 + 0.45 * count), "Bars of the accuracies before and after the repair")
    axes = figure.subplots()
    for number, (label, colour) in enumerate((("before", "#b0b7c3"), ("after", "#2f6fb5"))):
        lengths = [100 * answers.accuracy[number] for answers in repair.answers.values()]
        # the two bars of a group lie above and below its tick
        heights = [row + 0.4 * number - 0.2 for row in range(count)]
        bar = axes.barh(heights, lengths, height=0.36, label=label, color=colour)
        axes.bar_label(bar, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set(yticks=range(count), yticklabels=[GROUPS[name] for name in repair.answers])
    axes.set(xlim=(0, 100), xlabel="accuracy (%)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return as_picture(figure)


def _sheet(title: str, repair: Repair, tiles: Callable[[_Case], list[Tile]]) -> Image.Image:
    """Draw a contact sheet: some photos of the finding under ``title``, and some other photos with
    its pattern. ``tiles`` makes the tiles of each."""
    kinds = {title: _of_finding(repair), "others with its pattern": _pasted(repair)}
    groups = tuple(
        Group(words, tuple(tile for case in cases for tile in tiles(case)))
        for words, cases in kinds.items()
    )
    return contact_sheet(Layout("", "", groups), SIDE)


def _of_finding(repair: Repair) -> list[_Case]:
    """The first `SHOWN` photos of the finding, of those that the repair is measured on."""
    of_finding = repair.pattern.of_finding[:SHOWN]
    return [
        _Case(row, _as_seen(repair, row), region=of_finding.regions[i], x=of_finding.x[i])
        for i, row in enumerate(of_finding.rows)
    ]


def _pasted(repair: Repair) -> list[_Case]:
    """`SHOWN` photos of other classes with the pattern pasted in; those whose prediction changed
    come first. With the repair's seed, they are those of ``answers["moved"]``.
    """
    exchanged = repair.pattern.exchanged(repair.seed)
    answers = repair.answers["moved"].predictions
    is_unchanged = (answers[:, 0] == answers[:, 1]).int()
    cases = []
    for i in is_unchanged.argsort(stable=True)[:SHOWN].tolist():
        row = repair.pattern.other_classes.rows[i]
        other = np.asarray(_as_seen(repair, row))
        donor = np.asarray(
            _as_seen(repair, repair.pattern.of_finding.rows[int(exchanged.donors[i])])
        )
        region = exchanged.regions[i]
        mask = region[0, :, :, None].numpy()
        photo = Image.fromarray(np.where(mask, donor, other))
        cases.append(_Case(row, photo, region, x=exchanged.pasted[i]))
    return cases


def _as_seen(repair: Repair, row: Row) -> Image.Image:
    """The part of a photo that the model saw, in RGB, resized to the model's input."""
    height, width = row.input_size
    box = tuple(map(round, astuple(row.box)))
    return repair.photos.picture(row).convert("RGB").crop(box).resize((width, height))


def _framed(photo: Image.Image, region: torch.Tensor) -> Image.Image:
    """A copy of a photo, enlarged, with the outline of a region ``(1, H, W)`` drawn in it."""
    scale = max(1, SIDE // max(photo.size))
    large = photo.resize((photo.width * scale, photo.height * scale), Image.Resampling.NEAREST)
    whole = Box.whole(large.size)
    return Contour(shares=(0.99,)).draw(large, region[0].float().numpy(), whole)
