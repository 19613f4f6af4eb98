"""What the maps of a run say together, as pictures: mean maps, clusters with their photos, mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from PIL import Image

from explain._utils.errors import ExplainError
from explain.data.images import Box
from explain.insight.class_statistics import ClassStatistics, percent, short
from explain.insight.clusters import Cluster, distances
from explain.insight.confusions import Confusion
from explain.insight.maps import RunMaps
from explain.insight.reattribution import RunPhotos
from explain.render.overlays import drawn
from explain.render.sheets import Group, Layout, Tile, sheet
from explain.render.styles import Style, get_style
from explain.runs.reading import Row

SIDE = 180  # pixels of a mean map
PHOTOS = 4  # that stand for a class or a cluster
TILE = 200


class Album:
    """The photos of a run with their maps, for pictures; those that cannot be read are left out, and named.

    Args:
        photos: the photos of the run; ``photos.missing`` says which could not be read.
        method: whose maps.
        empty: whether it shows no photos at all.
    """

    def __init__(self, photos: RunPhotos, method: str, *, empty: bool = False) -> None:
        self.photos, self.method, self.empty = photos, method, empty
        self._rows: dict[tuple[str, str], Row] = {}

    def open(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Find the rows of photos and targets, all in one go through the run."""
        keys = set(wanted) - set(self._rows)
        if keys:
            found = ((row.name, row.target, row) for row in self.photos.run.rows(self.method))
            self._rows |= {(name, target): row for name, target, row in found if (name, target) in keys}

    def photo(self, row: Row) -> Image.Image | None:
        """A photo, or None where it cannot be read."""
        if self.empty:
            return None
        try:
            return self.photos.picture(row)
        except ExplainError as error:
            self.photos.missing[row.name] = str(error)
            return None

    def overlay(self, name: str, target: str) -> Image.Image | None:
        """The map of a photo, drawn on it."""
        row = self._rows.get((name, target))
        photo = None if row is None else self.photo(row)
        return None if row is None or photo is None else row.overlay(get_style(row.style), photo)


def picture_of(mean: torch.Tensor) -> Image.Image:
    """A mean map ``(16, 16)`` as a picture: the brightest place has the most."""
    blank = Image.new("RGB", (SIDE, SIDE), "white")
    values = (mean / mean.max().clamp(min=1e-12)).numpy()
    return get_style("intensity").draw(blank, values, Box(0, 0, float(SIDE), float(SIDE)))


def draw_looks(looks: Sequence[ClassStatistics], maps: RunMaps, album: Album, most: int = 6) -> Image.Image | None:
    """Draw where classes look: the mean map, and the photos whose maps are the nearest to it."""
    chosen = {look.target: [(name, look.target) for name in _central(look.target, maps)] for look in looks[:most]}
    album.open(key for keys in chosen.values() for key in keys)
    groups = []
    for look in looks[:most]:
        on_object = f", {percent(look.on_object.value)} on the object" if look.on_object.value >= 0 else ""
        figures, border = f"{look.photos} photos{on_object}", f"{percent(look.at_border.value)} at the border"
        groups.append(_group(look.target, figures, look.mean, border, _overlays(album, *chosen[look.target])))
    return _drawn("Where classes look, the most striking first", groups)


def _central(target: str, maps: RunMaps) -> list[str]:
    """The photos of a class whose maps are the nearest to the mean of all of its maps."""
    own = maps[maps.of_target[target]]
    mean = own.values.mean(0, keepdim=True)
    apart = [float(distances(torch.cat([mean, each[None]]))[0, 1]) for each in own.values]
    order = sorted(range(len(own)), key=apart.__getitem__)
    return [own.names[number] for number in order[:PHOTOS]]


def draw_clusters(clusters: Sequence[Cluster], album: Album, most: int = 6) -> Image.Image | None:
    """Draw clusters of reasons: the mean map of each, and photos that stand for it."""
    album.open((name, each.target) for each in clusters[:most] for name in each.photos[:PHOTOS])
    groups = []
    for each in clusters[:most]:
        figures = f"{each.size} photos, {percent(each.share)} of the class"
        shown = _overlays(album, *((name, each.target) for name in each.photos[:PHOTOS]))
        groups.append(_group(each.target, figures, each.mean, f"stands out by {each.stands_out:.2f}", shown))
    return _drawn("Clusters of reasons, those that stand out most first", groups)


def draw_mistakes(pairs: Sequence[Confusion], album: Album, most: int = 6) -> Image.Image | None:
    """Draw what spoke for the wrong class and for the right one, where mistakes were explained."""
    style = get_style("heat")
    groups = []
    for pair in pairs[:most]:
        tiles: list[Tile] = []
        for each in pair.spoken[:2]:
            photo = album.photo(each.row)
            if photo is None:
                continue
            for values, label in ((each.wrong, pair.prediction), (each.right, pair.label)):
                tiles.append(Tile(_on(photo, each.row, values, style), f"for {label}", short(each.row.name)))
        groups.append(Group(f"{pair.label} taken for {pair.prediction}: {pair.count} of {pair.of}", tuple(tiles)))
    return _drawn("Mistakes: what spoke for the wrong class, and for the right one", groups)


def _on(photo: Image.Image, row: Row, values: torch.Tensor, style: Style) -> Image.Image:
    """A heatmap ``(H, W)`` on the part of a photo that the model saw."""
    return drawn(photo, values.numpy(), style, row.box, [row.box])


def _group(target: str, figures: str, mean: torch.Tensor, about: str, photos: Sequence[Tile]) -> Group:
    """A mean map with what is said of it, in the heading where there is room for it."""
    if photos:
        return Group(f"{target}: {figures}", (Tile(picture_of(mean), "mean map", about), *photos))
    return Group(target, (Tile(picture_of(mean), figures, about),))


def _overlays(album: Album, *wanted: tuple[str, str]) -> list[Tile]:
    pictures = [(name, album.overlay(name, target)) for name, target in wanted]
    return [Tile(picture, short(name)) for name, picture in pictures if picture is not None]


def _drawn(title: str, groups: Sequence[Group]) -> Image.Image | None:
    full = tuple(group for group in groups if group.tiles)
    if not full:
        return None
    return sheet(Layout(title, "", full), TILE)
