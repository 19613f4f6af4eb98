"""Pictures of an insight: mean maps with photos that stand for them, and what spoke for either
class of a mistake."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from explain._utils.errors import ExplainError
from explain.data.boxes import Box
from explain.insight.class_statistics import ClassStatistics
from explain.insight.clusters import Cluster
from explain.insight.maps import RunMaps, heated, in_percent, short
from explain.insight.mistakes import Confusion, LabelMistakes
from explain.insight.reattribution import RunPhotos, one_for_each_photo
from explain.render.sheets import Group, Layout, Tile, contact_sheet, table
from explain.render.styles import get_style
from explain.store.reading import Row
from explain.targets import outputs

SIDE = 180  # pixels of a mean map
PHOTOS = 4  # photos that stand for a class or a cluster
TILE = 200  # pixels of a photo in a picture
CARD = 150  # pixels of a photo on a card, which has two abreast
GROUPS = 6  # classes, clusters or pairs of a picture
MISTAKES = 2  # photos of a pair of classes

Key = tuple[str, str]
"""The name of a photo, and the target."""


@dataclass(frozen=True)
class Album:
    """Reads the rows of one method of a run, and their photos, for pictures; with ``empty``, no
    photo is drawn, so that pictures may be published where photos may not."""

    photos: RunPhotos
    method: str
    empty: bool = False

    def rows(self, wanted: Collection[Key]) -> dict[Key, Row]:
        """Read the rows of the method with these names and targets, by name and target; those that
        the run does not have are missing."""
        return {
            (row.name, row.target): row
            for row in self.photos.run.rows(self.method)
            if (row.name, row.target) in wanted
        }

    def photo(self, row: Row) -> Image.Image | None:
        """The upright photo of a row; None where it cannot be read, or the album is ``empty``. The
        reason is noted in ``photos.missing``."""
        if self.empty:
            return None
        try:
            return self.photos.picture(row)
        except ExplainError as error:
            self.photos.missing[row.name] = str(error)
            return None


@dataclass(frozen=True, eq=False)
class MeanMap:
    """A mean map ``(16, 16)`` to draw: its title, a text of figures for the heading, a remark for
    under the map, and the names and targets of photos that stand for it."""

    title: str
    figures: str
    mean: torch.Tensor
    remark: str
    keys: list[Key]

    @property
    def picture(self) -> Image.Image:
        """The mean map, drawn so that its brightest place has the most evidence."""
        blank = Image.new("RGB", (SIDE, SIDE), "white")
        values = (self.mean / self.mean.max().clamp(min=1e-12)).numpy()
        return get_style("intensity").draw(blank, values, Box(0, 0, float(SIDE), float(SIDE)))


def draw_class_means(
    classes: Sequence[ClassStatistics], maps: RunMaps, album: Album
) -> Image.Image | None:
    """Draw a sheet of where classes look: the mean map of each class, and the photos whose maps are
    the nearest to it. None where there are no classes."""
    means = []
    for of_class in classes[:GROUPS]:
        class_maps = maps[maps.of_finding[of_class.target, of_class.finding]]
        # The sum of sqrt(p q) is the greater, the smaller the distance of Hellinger, by which
        # clusters are made.
        likeness = (class_maps.values.double() * of_class.mean.double()).sqrt().sum((1, 2))
        nearest = likeness.argsort(descending=True, stable=True)[:PHOTOS].tolist()
        figures = f"{of_class.photos} photos"
        if of_class.on_object.is_known:
            figures += f", {in_percent(of_class.on_object.value)} on the object"
        means.append(
            MeanMap(
                title=of_class.title,
                figures=figures,
                mean=of_class.mean,
                remark=f"{in_percent(of_class.at_border.value)} at the border",
                keys=[(class_maps.names[i], of_class.target) for i in nearest],
            )
        )
    return _draw_means("Where classes look, the most striking first", means, album)


def draw_clusters(clusters: Sequence[Cluster], album: Album) -> Image.Image | None:
    """Draw a sheet of clusters of reasons: the mean map of each, and photos whose maps are typical
    of it. None where there are no clusters."""
    means = [
        MeanMap(
            title=cluster.title,
            figures=f"{cluster.size} photos, {in_percent(cluster.share)} of the class",
            mean=cluster.mean,
            remark=f"stands out by {cluster.stands_out:.2f}",
            keys=[(name, cluster.target) for name in cluster.photos[:PHOTOS]],
        )
        for cluster in clusters[:GROUPS]
    ]
    return _draw_means("Clusters of reasons, those that stand out most first", means, album)


def _draw_means(title: str, means: Sequence[MeanMap], album: Album) -> Image.Image | None:
    """A sheet with a group for each mean map and the photos that stand for it; figures stand in the
    heading, or under a map alone, which is too narrow. None where there is nothing to draw.
    """
    rows = album.rows({key for mean in means for key in mean.keys})
    groups = []
    for mean in means:
        overlays = []
        for key in mean.keys:
            # a run that went on since may have another answer for this photo
            row = rows.get(key)
            photo = None if row is None else album.photo(row)
            if row is not None and photo is not None:
                overlays.append(Tile(row.overlay(get_style(row.style), photo), short(row.name)))
        if overlays:
            first = Tile(mean.picture, "mean map", mean.remark)
            groups.append(Group(f"{mean.title}: {mean.figures}", (first, *overlays)))
        else:
            groups.append(Group(mean.title, (Tile(mean.picture, mean.figures, mean.remark),)))
    return _drawn(title, groups)


def draw_mistakes(pairs: Sequence[Confusion], album: Album) -> Image.Image | None:
    """Draw a sheet of mistakes that were explained: in each photo, what spoke for the wrong class
    and for the right one. None where no mistake was explained."""
    groups = []
    for pair in pairs[:GROUPS]:
        tiles = []
        for mistake in pair.spoken[:MISTAKES]:
            photo = album.photo(mistake.row)
            if photo is not None:
                row = mistake.row
                of_both = ((mistake.wrong, pair.prediction), (mistake.right, pair.label))
                tiles += [
                    Tile(heated(photo, heatmap, row.box), f"for {label}", short(row.name))
                    for heatmap, label in of_both
                ]
        groups.append(
            Group(
                f"{pair.label} taken for {pair.prediction}: {pair.count} of {pair.of}", tuple(tiles)
            )
        )
    return _drawn("Mistakes: what spoke for the wrong class, and for the right one", groups)


def draw_label_mistakes(mistakes: Sequence[LabelMistakes], album: Album) -> dict[str, Image.Image]:
    """The cards of each label and kind of mistake, by "labels" and the heading of the kind: photos,
    the surest mistake first, with what supports the label in them, where known.
    """
    keys = {
        (name, mistake.label)
        for mistake in mistakes
        for _, photos in mistake.kinds
        for name in photos
    }
    rows_of_label = album.rows(keys)  # of photos whose map in the run is that of the label
    names = {name for name, _ in keys}
    any_rows = {row.name: row for row in one_for_each_photo(album.photos.run) if row.name in names}
    cards: dict[str, Image.Image] = {}
    for mistake in mistakes:
        for heading, photos in mistake.kinds:
            tiles = []
            for name, probability in photos.items():
                row = rows_of_label.get((name, mistake.label), any_rows[name])
                photo = album.photo(row)
                if photo is None:
                    continue
                remark = ""
                if row.target == mistake.label:
                    photo = row.overlay(get_style(row.style), photo)
                elif name in mistake.maps:
                    photo = heated(photo, mistake.maps[name], row.box)
                else:
                    remark = "no map without the model"
                tiles.append(Tile(photo, short(name), outputs.percent(probability), remark))
            pairs = [tiles[start : start + 2] for start in range(0, len(tiles), 2)]  # of a row
            if pairs:
                cards[f"labels {heading}"] = table(pairs, tile=CARD)
    return cards


def _drawn(title: str, groups: Sequence[Group]) -> Image.Image | None:
    """Draw a contact sheet of the groups that have tiles, under a title; None where no group
    has."""
    full = tuple(group for group in groups if group.tiles)
    return contact_sheet(Layout(title, "", full), TILE) if full else None
