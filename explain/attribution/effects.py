"""`Effects`: what patching each part of a network does to a score; as rows, a table and a
figure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from explain._utils.html import aligned, picture_html
from explain._utils.rounding import finite_or_none
from explain.render.figures import as_picture, empty
from explain.render.styles import SIGNED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


At = Literal["layers", "channels", "heads", "tokens", "positions", "regions"]


UNIT = "effect on the score"
SHOWN = 15  # rows of the table, but of layers all
DOTS = 110  # of the figure, an inch


@dataclass(frozen=True, eq=False)
class Effects:
    """What patching from a clean photo into a corrupted one does to a score; it prints itself as a
    table."""

    at: At
    # ``(units,)`` each: how much the score rises with each patch
    by_layer: Mapping[str, torch.Tensor] = field(repr=False)
    # attribution patching: the corrupted photo's gradient times the difference of values
    estimates: Mapping[str, torch.Tensor] = field(repr=False)
    # the scores of both photos
    clean: float
    corrupted: float
    target: str
    # rows and columns of a layer's units, where they are positions in the ``photo``, the clean one
    # in grey ``(H, W)`` from 0 to 1
    grid: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    photo: torch.Tensor | None = field(default=None, repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each patch: layer, unit (None for whole layers), effect, estimate and
        share of the difference of both scores (None if they are equal).
        """
        difference = self.clean - self.corrupted
        rows = []
        for layer, effects in self.by_layer.items():
            estimates = self.estimates[layer].tolist()
            for unit, effect in enumerate(effects.tolist()):
                rows.append(
                    {
                        "layer": layer,
                        "unit": None if self.at == "layers" else unit,
                        "effect": effect,
                        "estimate": estimates[unit],
                        "share": effect / difference if difference else None,
                    }
                )
        return rows

    @cached_property
    def correlation(self) -> float:
        """The correlation of the measured effects with their estimates; NaN if all of one of them
        are equal. Shown below the table, as the quality of attribution patching.
        """
        effects = torch.cat(list(self.by_layer.values())).double()
        estimates = torch.cat(list(self.estimates.values())).double()
        if len(effects) < 2:
            return math.nan
        return float(torch.corrcoef(torch.stack([effects, estimates]))[0, 1])

    def to_dict(self) -> dict[str, Any]:
        """The effects in plain values for JSON: scores, target, correlation and the rows."""
        return {
            "at": self.at,
            "target": self.target,
            "clean": self.clean,
            "corrupted": self.corrupted,
            "correlation": finite_or_none(self.correlation),
            "effects": self.rows(),
        }

    def __str__(self) -> str:
        """The effects as a table of text, for layers in their order, else the largest first."""
        rows = self.rows()
        if self.at != "layers":
            rows = sorted(rows, key=lambda row: -abs(row["effect"]))[:SHOWN]
        table = [["layer", self.at.removesuffix("s"), "effect", "share", "estimate"]]
        for row in rows:
            unit = "all" if row["unit"] is None else str(row["unit"])
            share = "" if row["share"] is None else f"{row['share']:.0%}"
            effect = f"{row['effect']:.3g}"
            table.append([row["layer"], unit, effect, share, f"{row['estimate']:.3g}"])
        first = f"score of {self.target}: clean {self.clean:.4g}, corrupted {self.corrupted:.4g}"
        last = f"correlation of effects and estimates: {self.correlation:.2f}"
        return "\n".join([first, *aligned(table, to_the_right=range(1, 5)), last])

    def figure(self) -> "Figure":
        """Return a matplotlib figure of the effects: bars for layers, a grid of layers by units, or
        maps on the photo. The caller owns the figure, and saves or shows it.
        """
        if self.at == "layers":
            return self._bars()
        return self._maps() if self.grid else self._table()

    def _bars(self) -> "Figure":
        """The figure for patched layers: a bar for each layer's effect."""
        figure = self._empty(6.4, 0.8 + 0.28 * len(self.by_layer))
        axes = figure.subplots()
        axes.barh(
            list(self.by_layer),
            [float(effects[0]) for effects in self.by_layer.values()],
            color="#4477aa",
        )
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.axvline(0, color="#444444", linewidth=0.8)
        axes.set_xlabel(f"{UNIT} of {self.target}")
        return figure

    def _maps(self) -> "Figure":
        """The figure for units that are places of the photo: a map of the effects for each layer,
        on the photo. matplotlib is imported here, as importing the package must stay light.
        """
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        columns = min(4, len(self.by_layer))
        rows = math.ceil(len(self.by_layer) / columns)
        figure = self._empty(2.4 * columns + 0.8, 2.5 * rows)
        figure.subplots(
            rows, columns, squeeze=False, subplot_kw={"frame_on": False, "xticks": [], "yticks": []}
        )
        # axes may be left over in the last row
        for axes, (layer, unit_effects) in zip(figure.axes, self.by_layer.items(), strict=False):
            effects = unit_effects.reshape(self.grid[layer]).numpy()
            height, width = effects.shape if self.photo is None else self.photo.shape
            extent = (0, width, height, 0)
            opacity = None
            if self.photo is not None:  # pale, and it shows through where a patch does little
                axes.imshow(self.photo.numpy(), cmap="gray", vmin=-0.3, vmax=1.3, extent=extent)
                opacity = (0.15 + abs(effects) / self._largest).clip(max=0.85)
            axes.imshow(effects, **self._colors, extent=extent, alpha=opacity)
            axes.set_title(layer, fontsize=9)
        # the colour bar is drawn without transparency
        colors = ScalarMappable(Normalize(-self._largest, self._largest), SIGNED)
        figure.colorbar(colors, ax=figure.axes, label=UNIT, shrink=0.7)
        return figure

    def _table(self) -> "Figure":
        """The figure for other units: a row of coloured cells for each layer, one for each unit."""
        from matplotlib.ticker import MaxNLocator

        table = pad_sequence(list(self.by_layer.values()), batch_first=True, padding_value=math.nan)
        figure = self._empty(min(12.0, 2.4 + 0.3 * table.shape[1]), 1.2 + 0.32 * len(table))
        axes = figure.subplots()
        picture = axes.imshow(table.numpy(), aspect="auto", **self._colors)
        axes.set_yticks(range(len(self.by_layer)), list(self.by_layer))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(self.at.removesuffix("s"))
        figure.colorbar(picture, ax=axes, label=UNIT)
        return figure

    @property
    def _largest(self) -> float:
        """The largest magnitude of an effect, which the colours end at; 1 if all are zero."""
        return max(float(effects.abs().max()) for effects in self.by_layer.values()) or 1.0

    @property
    def _colors(self) -> dict[str, Any]:
        """The arguments of ``imshow`` for effects: one colour scale for all layers, with zero in
        its middle."""
        return {"cmap": SIGNED, "vmin": -self._largest, "vmax": self._largest}

    def picture(self) -> Image.Image:
        """The figure of the effects as a picture."""
        return as_picture(self.figure())

    def _empty(self, width: float, height: float) -> "Figure":
        """An empty figure of this size in inches, with the alternative text."""
        return empty((width, height), self.alternative, DOTS)

    @property
    def alternative(self) -> str:
        """The alternative text of the figure, for people who do not see it."""
        return f"effects of patches by {self.at} on {self.target}"

    def _repr_html_(self) -> str:
        return picture_html(self.picture(), self.alternative)
