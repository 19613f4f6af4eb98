"""The explanations of several models for one photo: their maps side by side, and where each differs
from the first."""

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
    """What differs between models: ``summary`` in plain values, ``lines`` for people, a row of
    ``tiles`` for a map."""

    summary: Mapping[str, Any]
    lines: list[str]
    tiles: list[list[Tile]] = field(repr=False)

    def picture(self) -> Image.Image:
        """The map of each model, and then the difference of each other from the first; targets and
        methods in rows."""
        first, *later_models = self.summary["models"]
        headings = [first, *later_models, *(f"{name} − {first}" for name in later_models)]
        return sheets.table(self.tiles, headings, tile=300)

    def to_html(self) -> str:
        """A page with the lines and the picture."""
        title = " and ".join(self.summary["models"])
        pictures = [(self.picture(), f"maps of {title}, and their differences")]
        return document(
            title, "", [Section("Where they differ", "\n".join(self.lines), pictures=pictures)]
        )


def heat(models: Mapping[str, Explanation], target: int, method: str) -> list[np.ndarray[Any, Any]]:
    """The heatmap of each model in pixels of the photo, zero where one of them did not see it."""
    cells = np.ones((1, 1), np.float32)
    shown = np.logical_and.reduce(
        [styles.mask_above(cells, 1, one.photo.size, one.box) for one in models.values()]
    )
    heatmaps = []
    for one in models.values():
        values = array(one.results[target][method].heatmap[0])
        heatmaps.append(
            styles.resampled_on_photo(values, one.photo.size, one.box) / np.float32(255) * shown
        )
    return heatmaps


def compare(models: Mapping[str, Explanation]) -> Comparison:
    """Compare the explanations of one photo for the same targets, by the names of the models.

    The share of a model's heat in other places than that of the first is half of |p - q| over all
    pixels, where p and q are the heatmaps, each divided by its sum.
    """
    names = list(models)
    explanations = list(models.values())
    lines = []
    for name, explanation in models.items():
        lines += [f"{name}: {best.label} {best.amount}" for best in explanation.predicted[:1]]
    maps = []
    tiles = []
    for number, target in enumerate(explanations[0].targets):
        for method in explanations[0].methods:
            if not all(method in explanation for explanation in explanations):
                continue
            heatmaps = heat(models, number, method)
            first_share = _share(heatmaps[0])
            elsewhere = [
                float(np.abs(_share(values) - first_share).sum() / 2) for values in heatmaps
            ]
            maps.append(
                {
                    "target": target,
                    "method": method,
                    "elsewhere": dict(zip(names, elsewhere, strict=True)),
                }
            )
            row = [
                Tile(one.overlay(method, number), title_of(method), one.targets[number])
                for one in explanations
            ]
            for index, name in enumerate(names[1:], 1):
                difference = _difference(explanations[0].photo, heatmaps[index] - heatmaps[0])
                row.append(
                    Tile(
                        difference,
                        f"{elsewhere[index]:.0%} elsewhere",
                        f"red: {name} has more heat",
                    )
                )
                lines.append(
                    f"{title_of(method)} of {target}: {elsewhere[index]:.0%} of the heat of "
                    f"{name} is in other places than that of {names[0]}"
                )
            tiles.append(row)
    predictions = {name: explanation.predictions for name, explanation in models.items()}
    return Comparison({"models": names, "predictions": predictions, "maps": maps}, lines, tiles)


def _share(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A heatmap that adds up to one; zero stays zero."""
    return values / (values.sum() or 1)


def _difference(photo: Image.Image, values: np.ndarray[Any, Any]) -> Image.Image:
    whole = Box.whole(photo.size)
    return overlays.draw_marked(photo, values, styles.get_style("signed"), whole, [whole])
