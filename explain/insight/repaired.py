"""What a repair did: answers before and after, and a page with the mark, the accuracies and the maps in pictures."""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, overheard
from explain.attribution.api import attribute
from explain.data.files import Files
from explain.data.images import Box
from explain.insight.ablation import sign_test
from explain.insight.maps import aligned, fields_of, heated, percent
from explain.insight.marks import MarkedPhotos
from explain.insight.reattribution import RunPhotos, method_in
from explain.render.sheets import Group, Layout, Tile, sheet
from explain.report.pages import Section, document
from explain.runs.reading import Row
from explain.targets import TopClass
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
        sections = [Section("The answers", told, self.rows)]
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


def maps(repair: Repair) -> Image.Image:
    """What both models read their top class from, in photos of the finding and in others with its mark."""
    explainer, run = repair.photos.explainer, repair.photos.run
    method = method_in(run, run.methods[0])
    cases = [(row, _seen(repair, row), repair.marks.carriers.x[i]) for i, (row, _) in enumerate(_own(repair))]
    cases += [(row, photo, x) for row, photo, _, x in _moved(repair)]
    tiles = []
    for row, photo, x in cases:
        for name, model in (("before", explainer.model), ("after", repair.model)):
            with overheard([]):
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
