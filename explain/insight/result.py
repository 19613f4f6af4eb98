"""`insight`: what the maps of a run say together, as tables, pictures and a page."""

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import ArgumentError, ExplainError, RunError, either, keywords, option, printable, shown
from explain.data.boxes import Box
from explain.data.files import Files
from explain.explanation.explainer import Explainer
from explain.hooks.layer_names import Where
from explain.insight import class_statistics
from explain.insight.channels import ChannelReport
from explain.insight.channels import channels as find_channels
from explain.insight.class_statistics import ClassStatistics, Cluster, Confusion, OddEvidence, distances, with_reasons
from explain.insight.concepts import Direction, SharedConcepts, concept_direction, shared_concepts
from explain.insight.maps import RunMaps, aligned, heated, percent, plain, read_maps, short
from explain.insight.reattribution import RunPhotos, method_in
from explain.render.sheets import Group, Layout, Tile, sheet
from explain.render.styles import get_style
from explain.report.pages import Section, document
from explain.store.lists import source_of
from explain.store.reading import Row, StoredRun

SIDE = 180  # pixels of a mean map
PHOTOS = 4  # that stand for a class or a cluster
TILE = 200


@dataclass(frozen=True)
class Album:
    """Reads rows of one method, and their photos; ``empty`` has no photos."""

    photos: RunPhotos
    method: str
    empty: bool = False

    def rows(self, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], Row]:
        """The rows with these names and targets."""
        return {key: row for row in self.photos.run.rows(self.method) if (key := (row.name, row.target)) in wanted}

    def photo(self, row: Row) -> Image.Image | None:
        """A photo, or None where it cannot be read."""
        if self.empty:
            return None
        try:
            return self.photos.picture(row)
        except ExplainError as error:
            self.photos.missing[row.name] = str(error)
            return None

    def overlay(self, row: Row) -> Image.Image | None:
        """The map of a photo, drawn on it."""
        photo = self.photo(row)
        return None if photo is None else row.overlay(get_style(row.style), photo)


MeanMap = tuple[str, str, torch.Tensor, str, list[tuple[str, str]]]
"""The target, figures, the map, what else is said of it, and photos that stand for it by names and targets."""


def picture_of(mean: torch.Tensor) -> Image.Image:
    """A mean map ``(16, 16)`` as a picture: the brightest place has the most."""
    blank = Image.new("RGB", (SIDE, SIDE), "white")
    values = (mean / mean.max().clamp(min=1e-12)).numpy()
    return get_style("intensity").draw(blank, values, Box(0, 0, float(SIDE), float(SIDE)))


def draw_looks(looks: Sequence[ClassStatistics], maps: RunMaps, album: Album, most: int = 6) -> Image.Image | None:
    """Draw where classes look: the mean map, and the photos whose maps are the nearest to it."""
    means: list[MeanMap] = []
    for look in looks[:most]:  # the photos whose maps are the nearest to the mean of all of its maps
        own = maps[maps.of_target[look.target]]
        mean = own.values.mean(0, keepdim=True)
        apart = torch.stack([distances(torch.cat([mean, each[None]]))[0, 1] for each in own.values])
        keys = [(own.names[i], look.target) for i in apart.argsort(stable=True)[:PHOTOS].tolist()]
        on_object = f", {percent(look.on_object.value)} on the object" if look.on_object.value >= 0 else ""
        border = f"{percent(look.at_border.value)} at the border"
        means.append((look.target, f"{look.photos} photos{on_object}", look.mean, border, keys))
    return draw_means("Where classes look, the most striking first", means, album)


def draw_clusters(clusters: Sequence[Cluster], album: Album, most: int = 6) -> Image.Image | None:
    """Draw clusters of reasons: the mean map of each, and photos that stand for it."""
    means: list[MeanMap] = []
    for each in clusters[:most]:
        figures = f"{each.size} photos, {percent(each.share)} of the class"
        keys = [(name, each.target) for name in each.photos[:PHOTOS]]
        means.append((each.target, figures, each.mean, f"stands out by {each.stands_out:.2f}", keys))
    return draw_means("Clusters of reasons, those that stand out most first", means, album)


def draw_means(title: str, means: Sequence[MeanMap], album: Album) -> Image.Image | None:
    """Draw mean maps, each with what is said of it, in the heading where there is room for it, and with photos."""
    rows, groups = album.rows({key for *_, keys in means for key in keys}), []
    for target, figures, mean, about, keys in means:
        pictures = [(album.overlay(rows[key]), short(key[0])) for key in keys if key in rows]
        photos = [Tile(picture, name) for picture, name in pictures if picture is not None]
        if photos:
            groups.append(Group(f"{target}: {figures}", (Tile(picture_of(mean), "mean map", about), *photos)))
        else:
            groups.append(Group(target, (Tile(picture_of(mean), figures, about),)))
    return _drawn(title, groups)


def draw_mistakes(pairs: Sequence[Confusion], album: Album, most: int = 6) -> Image.Image | None:
    """Draw what spoke for the wrong class and for the right one, where mistakes were explained."""
    groups = []
    for pair in pairs[:most]:
        tiles: list[Tile] = []
        for each in pair.spoken[:2]:
            photo = album.photo(each.row)
            if photo is None:
                continue
            for values, label in ((each.wrong, pair.prediction), (each.right, pair.label)):
                tiles.append(Tile(heated(photo, values, each.row.box), f"for {label}", short(each.row.name)))
        groups.append(Group(f"{pair.label} taken for {pair.prediction}: {pair.count} of {pair.of}", tuple(tiles)))
    return _drawn("Mistakes: what spoke for the wrong class, and for the right one", groups)


def _drawn(title: str, groups: Sequence[Group]) -> Image.Image | None:
    full = tuple(group for group in groups if group.tiles)
    return sheet(Layout(title, "", full), TILE) if full else None


NOTABLE = 0.5  # how far a cluster stands out that is worth a look
MIN_RESOLUTION = 6  # places along a side of maps without which a mark cannot be told from what is beside it
SECTIONS = tomllib.loads((resources.files("explain.insight") / "sections.toml").read_text("utf-8"))


@dataclass(frozen=True, eq=False, repr=False)
class Insight:
    """What the maps of a run say together; it prints itself.

    ``looks`` says where each class looks, the most striking first. ``reasons`` are the clusters of maps of one class,
    those that stand out most first. ``pairs`` are the classes that are taken for others, the most frequent first.
    ``maps`` has all maps on one grid. ``evidence`` lists photos whose smallest evidence is not on the object; None
    where the run has no `Sufficient` or `Necessary`. ``channels``, ``concepts`` and ``direction`` are results that need
    the model; None where they were not requested.
    """

    run: StoredRun
    method: str
    maps: RunMaps = field(repr=False)
    looks: Sequence[ClassStatistics]
    reasons: Sequence[Cluster]
    pairs: Sequence[Confusion]
    channels: ChannelReport | None = None
    concepts: SharedConcepts | None = None
    direction: Direction | None = None
    photos: RunPhotos | None = field(default=None, repr=False)
    evidence: Sequence[OddEvidence] | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        further = {name: plain(getattr(self, name)) for name in ("channels", "concepts", "direction", "evidence")}
        return {
            "run": str(self.run.path), "method": self.method, "maps": len(self.maps), "empty": self.maps.empty,
            "repeated": self.maps.repeated, "looks": plain(self.looks), "reasons": plain(self.reasons),
            "mistakes": plain(self.pairs), **{name: each for name, each in further.items() if each is not None},
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    @property
    def about(self) -> str:
        """How many maps there are, and what was left out."""
        left = [f"{self.maps.empty} of zeros"] * bool(self.maps.empty)
        left += [f"{self.maps.repeated} of photos that were there twice"] * bool(self.maps.repeated)
        told = f"; left out: {', '.join(left)}" if left else ""
        return printable(f"{self.run.path}: {len(self.maps)} maps of {self.method}{told}")

    @property
    def headlines(self) -> list[str]:
        """What stands out most of each kind, in a sentence each."""
        found = []
        height, width = self.maps.resolution or (MIN_RESOLUTION, MIN_RESOLUTION)
        if min(height, width) < MIN_RESOLUTION:
            found.append(f"The maps have {height} × {width} places: too few to tell a mark from the object. Run an "
                         "earlier layer (explain layers lists them).")  # fmt: skip
        for look in self.looks[:1]:
            if look.striking > 0 and look.on_object.value >= 0:
                share, size = percent(look.on_object.value), percent(look.object_size.value)
                found.append(f"The maps of {look.target} are on the object least, relative to its size: {share} of "
                             f"the evidence is on it, and it covers {size} of the photo.")  # fmt: skip
            elif look.striking > 0:
                apart = f"their mean maps are apart by {look.apart:.2f}"
                found.append(f"The maps of {look.target} differ most from those of the other classes: {apart}.")
        for each in self.reasons[:1]:
            by = f"{each.stands_out:.2f}"
            if each.stands_out < NOTABLE:
                found.append(f"No cluster of reasons stands out: by {by} at most, where {NOTABLE} is worth a look.")
            else:
                own = f"a reason of their own ({percent(each.share)} of the class)"
                found.append(f"{each.size} photos of {each.target} have {own}: they stand out by {by}.")
        for pair in [each for each in self.pairs if each.of >= class_statistics.LEAST][:1]:
            counts = f"{pair.count} of {pair.of} photos"
            found.append(f"{pair.label} is taken for {pair.prediction} most often: {counts}.")
        return [printable(line) for line in found]

    def parts(self, most: int = 10) -> dict[str, Section]:
        """The tables: where classes look, clusters of reasons, mistakes, and what else was requested.

        Args:
            most: rows of each table.
        """
        tables: dict[str, Sequence[Any] | None] = {
            "looks": self.looks[:most], "reasons": self.reasons[:most], "mistakes": self.pairs[:most],
            "evidence": None if self.evidence is None else self.evidence[:most],
            "channels": None if self.channels is None else self.channels.channels[:most],
            "concepts": None if self.concepts is None else self.concepts.rows,
            "direction": None if self.direction is None else [self.direction],
        }  # fmt: skip
        found = {}
        for name, rows in tables.items():
            if rows is not None:
                about, cells = SECTIONS[name], [getattr(each, "cells", each) for each in rows]
                told = about["about" if rows else "nothing"].format(**vars(self))
                found[name] = Section(about["title"].format(**vars(self)), told, [about["head"], *cells])
        return found

    def finding(self, which: int | str) -> Cluster | ClassStatistics:
        """Return the cluster with a number, from 1, or what is known of a class: what `explain.insight.repair` takes.

        Raises:
            RunError: there is no such cluster or class.
        """
        if str(which).isdecimal() and 1 <= int(which) <= len(self.reasons):
            return self.reasons[int(which) - 1]
        for look in self.looks:
            if look.target == which:
                return look
        known = f"the number of a cluster, 1 to {len(self.reasons)}, or the label of a class"
        raise RunError(f"{option('finding')} must be {known}, got {shown(which)}; the insight lists them")

    def lines(self, most: int = 10) -> list[str]:
        """The tables as lines for people; see `parts`."""
        lines = [self.about, *(f"  {line}" for line in self.headlines)]
        for part in self.parts(most).values():
            lines += ["", part.heading, *(aligned(part.table) if len(part.table) > 1 else [f"  {part.about}"])]
        return lines

    def pictures(self, source: Any = None, *, photos: bool = True) -> dict[str, Image.Image]:
        """Draw "looks", "reasons", "mistakes" where they were explained, and "channels" and "concepts" if requested.

        Args:
            source: where photos come from that had no file.
            photos: whether photos are drawn; without, the pictures of mean maps may be published where photos may not.

        Photos that cannot be read are left out.
        """
        album = Album(RunPhotos(self.run, source=source), self.method, empty=not photos)
        found = {"looks": draw_looks(self.looks, self.maps, album), "reasons": draw_clusters(self.reasons, album)}
        found["mistakes"] = draw_mistakes(self.pairs, album)
        drawn = {name: picture for name, picture in found.items() if picture is not None}
        for name, each in (("channels", self.channels), ("concepts", self.concepts)):
            if photos and each is not None and self.photos is not None:
                try:
                    drawn[name] = each.picture(self.photos)
                except ExplainError as error:  # photos that are tensors, or gone since
                    self.photos.missing[name] = str(error)
        return drawn

    def save(self, folder: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False) -> list[Path]:
        """Write the pictures, ``insight.json`` and a page with all of it, ``insight.html``; return the paths.

        Args:
            folder: where to.
            source: where photos come from that had no file.
            overwrite: replace files that are there.

        Raises:
            OutputError: they cannot be written.
        """
        files = Files(folder, overwrite=overwrite)
        pictures = self.pictures(source)
        for name, picture in pictures.items():
            files.add_picture(f"{name}.png", picture)
        files.add_json("insight.json", self.to_dict())
        files.add_text("insight.html", self._page(pictures))
        return files.write()

    def _page(self, pictures: Mapping[str, Image.Image]) -> str:
        sections = [Section("Summary", "\n".join(self.headlines))] if self.headlines else []
        for name, part in self.parts(20).items():
            shown = [(pictures[name], part.heading)] if name in pictures else []
            sections.append(replace(part, pictures=shown))
        return document(f"What {self.run.path.name} says", self.about, sections)


@keywords()
def insight(
    run: StoredRun, method: str | None = None, *, explainer: Explainer | None = None,
    source: Any = None, channels: int = 0, concepts: int = 0, examples: Any = None, target: int | str | None = None,
    layer: Where | None = None, seed: int = 0,
) -> Insight:  # fmt: skip
    """Say what the maps of a run say together: where classes look, clusters of reasons, mistakes.

    Args:
        run: the run.
        method: whose maps; by default the first of the run.
        explainer: what the run was made with; with it, mistakes are explained. What follows needs it.
        source: where photos come from that had no file.
        channels: of how many channels of a layer it says what they see; those that do most for ``target``.
        concepts: how many concepts are looked for that all photos share.
        examples: a source of photos, such as a folder, that have a concept: is ``target`` read from it?
        target: a class, by number or label; for channels, None is the best class of each photo.
        layer: where channels and concepts are looked for; None finds the last feature map.
        seed: of what is drawn by chance.

    Raises:
        RunError: there is no such method, or the explainer is not that of the run.
        ArgumentError: the explainer is needed, or an argument has no effect.
        TargetError, LayerError: there is no such class, or layer.
    """
    given = {"channels": channels or None, "concepts": concepts or None, "examples": examples}
    requested = [name for name, value in given.items() if value is not None]
    for name, value in (("target", target), ("layer", layer)):
        if value is not None and not requested:
            raise ArgumentError(f"{option(name)} has no effect without channels, concepts or examples; leave it out")
    if requested and explainer is None:
        remedy = either("give the explainer of the run", "give --model")
        raise ArgumentError(f"{option(requested[0])} must have the model, got none; {remedy}")
    if examples is not None and target is None:
        raise ArgumentError(f"{option('target')} must say of which class the examples may be a reason; give a class")
    if target is not None and requested == ["concepts"]:
        raise ArgumentError(f"{option('target')} has no effect with concepts, which all photos share; leave it out")
    maps, pairs = read_maps(run, method), class_statistics.pairs(run)
    looks, reasons = class_statistics.looks(maps), class_statistics.reasons(maps, seed=seed)
    evidence = class_statistics.odd_evidence(run)
    if explainer is None:
        return Insight(run, maps.method, maps, looks, reasons, pairs, evidence=evidence)
    photos = RunPhotos(run, explainer, source)
    direction = None
    if examples is not None and target is not None:
        own = source_of(examples)
        entries = list(own.entries())
        for entry in entries:
            if entry.problem is not None:
                raise RunError(f"examples must be readable, but {entry.name!r} is not ({entry.problem}); remove it")
        direction = concept_direction(photos, [own.read(each).image for each in entries], target, layer=layer)
    return Insight(
        run, maps.method, maps, looks, reasons,
        with_reasons(pairs, photos, method_in(run, maps.method)),
        find_channels(photos, target, layer=layer, count=channels) if channels else None,
        shared_concepts(photos, concepts, layer=layer) if concepts else None,
        direction, photos, evidence,
    )  # fmt: skip
