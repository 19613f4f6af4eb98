"""The explanations of several models for one photo: their maps side by side, and where each differs from the first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from explain.attribution.pictures import array
from explain.data.boxes import Box
from explain.explanation.explanation import Explanation
from explain.methods.base import title_of
from explain.render import overlays, sheets, styles
from explain.render.sheets import Tile
from explain.report.pages import Section, document


@dataclass(frozen=True)
class Comparison:
    """What differs between models: ``summary`` in plain values, ``lines`` for people, a row of ``tiles`` for a map."""

    summary: Mapping[str, Any]
    lines: list[str]
    tiles: list[list[Tile]] = field(repr=False)

    def picture(self) -> Image.Image:
        """The map of each model, and then the difference of each other from the first; targets and methods in rows."""
        first, *others = self.summary["models"]
        return sheets.table(self.tiles, [first, *others, *(f"{name} − {first}" for name in others)], tile=300)

    def to_html(self) -> str:
        """A page with the lines and the picture."""
        title = " and ".join(self.summary["models"])
        pictures = [(self.picture(), f"maps of {title}, and their differences")]
        return document(title, "", [Section("Where they differ", "\n".join(self.lines), pictures=pictures)])


def heat(models: Mapping[str, Explanation], target: int, method: str) -> list[np.ndarray[Any, Any]]:
    """The heatmap of each model in pixels of the photo, zero where one of them did not see it."""
    cells = np.ones((1, 1), np.float32)
    seen = np.logical_and.reduce([styles.area(cells, 1, each.photo.size, each.box) for each in models.values()])
    maps = [(array(each.results[target][method].heatmap[0]), each) for each in models.values()]
    return [styles.place(values, each.photo.size, each.box) / np.float32(255) * seen for values, each in maps]


def compare(models: Mapping[str, Explanation]) -> Comparison:
    """Compare the explanations of one photo for the same targets, by the names of the models.

    The share of a model's heat in other places than that of the first is half of |p - q| over all pixels, where p
    and q are the heatmaps, each divided by its sum.
    """
    first = next(iter(models))
    photo, targets = models[first].photo, models[first].targets
    predictions = {name: each.predictions for name, each in models.items()}
    lines = [f"{name}: {best.label} {best.amount}" for name, each in models.items() for best in each.predicted[:1]]
    whole, signed = Box(0, 0, *map(float, photo.size)), styles.get_style("signed")
    maps, tiles = [], []
    for number, results in enumerate(zip(*(each.results for each in models.values()), strict=True)):
        for method in (name for name in results[0] if all(name in result for result in results)):
            maps_of = heat(models, number, method)
            shares = [values / (values.sum() or 1) for values in maps_of]
            elsewhere = {n: float(np.abs(q - shares[0]).sum() / 2) for n, q in zip(models, shares, strict=True)}
            maps.append({"target": targets[number], "method": method, "elsewhere": elsewhere})
            row = [Tile(e.overlay(method, number), title_of(method), e.targets[number]) for e in models.values()]
            for name, values in list(zip(models, maps_of, strict=True))[1:]:
                drawn = overlays.drawn(photo, values - maps_of[0], signed, whole, [whole])
                row.append(Tile(drawn, f"{elsewhere[name]:.0%} elsewhere", f"red: {name} has more heat"))
                about = f"{title_of(method)} of {targets[number]}: {elsewhere[name]:.0%} of the heat of {name}"
                lines.append(f"{about} is in other places than that of {first}")
            tiles.append(row)
    return Comparison({"models": list(models), "predictions": predictions, "maps": maps}, lines, tiles)
