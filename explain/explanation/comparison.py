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
    """What differs between the explanations that several models have for one photo."""

    summary: Mapping[str, Any]
    """For JSON: the models, their predictions, and for each map the share of the heat
    ``elsewhere``."""
    lines: list[str]
    """The same for people."""
    tiles: list[list[Tile]] = field(repr=False)
    """A row for each target and method, as `picture` shows it."""

    def picture(self) -> Image.Image:
        """Return a table of pictures, with a row for each target and method: the map of each model,
        and then the difference of each later model from the first."""
        first, *later_models = self.summary["models"]
        headings = [first, *later_models, *(f"{name} − {first}" for name in later_models)]
        return sheets.table(self.tiles, headings, tile=300)

    def to_html(self) -> str:
        """Return an HTML page with the lines and the picture of the comparison."""
        title = " and ".join(self.summary["models"])
        pictures = [(self.picture(), f"maps of {title}, and their differences")]
        return document(
            title, "", [Section("Where they differ", "\n".join(self.lines), pictures=pictures)]
        )


def heat(models: Mapping[str, Explanation], target: int, method: str) -> list[np.ndarray[Any, Any]]:
    """The heatmap of each model, ``(height, width)`` in pixels of the photo, in [0, 1]; zero where
    one of the models did not see the photo, so that crops do not count as differences.
    """
    cells = np.ones((1, 1), np.float32)  # a map of one cell covers all that a model saw
    seen_by_all = np.logical_and.reduce(
        [
            styles.mask_above(cells, 1, explanation.photo.size, explanation.box)
            for explanation in models.values()
        ]
    )
    heatmaps = []
    for explanation in models.values():
        values = array(explanation.results[target][method].heatmap[0])
        heatmaps.append(
            styles.resampled_on_photo(values, explanation.photo.size, explanation.box)
            / np.float32(255)  # from uint8
            * seen_by_all
        )
    return heatmaps


def compare(models: Mapping[str, Explanation]) -> Comparison:
    """Compare one photo's explanations with the first model's, target by target in their order. The
    heat in other places is half of |p - q| over all pixels, where p and q are heatmaps divided by
    their sums.
    """
    names = list(models)
    explanations = list(models.values())
    lines = []
    for name, explanation in models.items():
        lines += [f"{name}: {best.label} {best.amount}" for best in explanation.predicted[:1]]
    maps = []
    tiles = []
    # of detections, a later model may have fewer
    target_count = min(len(explanation.results) for explanation in explanations)
    for number, target in enumerate(explanations[0].targets[:target_count]):
        for method in explanations[0].methods:
            if not all(method in explanation for explanation in explanations):
                continue
            heatmaps = heat(models, number, method)
            first_share = _share(heatmaps[0])
            shares_elsewhere = [
                float(np.abs(_share(values) - first_share).sum() / 2) for values in heatmaps
            ]
            maps.append(
                {
                    "target": target,
                    "method": method,
                    "elsewhere": dict(zip(names, shares_elsewhere, strict=True)),
                }
            )
            row = [
                Tile(
                    explanation.overlay(method, number),
                    title_of(method),
                    # its own best, where the model has no label of the first one's target
                    explanation.targets[number],
                )
                for explanation in explanations
            ]
            for index, name in enumerate(names[1:], 1):
                difference = _difference(explanations[0].photo, heatmaps[index] - heatmaps[0])
                row.append(
                    Tile(
                        difference,
                        f"{shares_elsewhere[index]:.0%} elsewhere",
                        f"red: {name} has more heat",
                    )
                )
                lines.append(
                    f"{title_of(method)} of {target}: {shares_elsewhere[index]:.0%} of the heat of "
                    f"{name} is in other places than that of {names[0]}"
                )
            tiles.append(row)
    predictions = {name: explanation.predictions for name, explanation in models.items()}
    return Comparison({"models": names, "predictions": predictions, "maps": maps}, lines, tiles)


def _share(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a heatmap divided by its sum; a heatmap of zeros stays as it is."""
    return values / (values.sum() or 1)


def _difference(photo: Image.Image, values: np.ndarray[Any, Any]) -> Image.Image:
    """Draw the difference of two heatmaps in pixels of the photo, in [-1, 1], on it: red where the
    later model has more heat than the first, blue where it has less."""
    whole = Box.whole(photo.size)
    return overlays.draw_marked(photo, values, styles.get_style("signed"), whole, [whole])
