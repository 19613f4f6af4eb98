"""A figure of several photos: a row for each, with its maps by several methods."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack, get_args

from explain._utils.errors import ExplainError, check_choice, keywords, shown
from explain.attribution import pictures
from explain.attribution.pictures import LARGEST_SIDE, Look, Order, Part, Scene
from explain.attribution.result import Attribution
from explain.explanation.explanation import Explanation, StyleOptions
from explain.methods.base import FAMILIES, innermost_method
from explain.render import figures, overlays
from explain.render.captions import Legend
from explain.render.sheets import Group, Layout, Tile
from explain.render.styles import Colored, Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale: TypeAlias = Literal["own", "shared"]


@keywords(StyleOptions)
def figure(
    explanations: Sequence[Explanation],
    *,
    methods: Sequence[str] | None = None,
    target: int | str = 0,
    scale: Scale = "own",
    width_cm: float | None = None,
    letters: bool = False,
    order: Order = "given",
    crop: Part = "photo",
    **options: Unpack[StyleOptions],
) -> "Figure":
    """Return a matplotlib figure of several photos: a row for each, with a column for each method.

    As in `explain.Explanation.figure`, pictures are images of 300 dots per inch, and texts stay
    texts in ``savefig("maps.pdf")`` and ``savefig("maps.svg")``.

    Args:
        explanations: what an `explain.Explainer` returns for a list of photos, or any other
            explanations.
        methods: which of their methods; by default those that all of them have.
        target: which of the targets of each explanation, by position or label.
        scale: "shared" draws all maps of one method on one scale, whose end is the largest value
            of these, so that a pale map has smaller values; by default each map has its own.
        width_cm: how wide it is: 8 and 17 cm are usual in papers of two columns.
        letters: put (a), (b), … above the pictures.
        order: "given" is the order of ``methods``, "family" that of the families of methods.
        crop: "seen" shows only the part of each photo that the model saw.
        style, alpha, colormap: as for `explain.Explanation.overlay`.

    Raises:
        ExplainError: there is no explanation, a method or target was not explained in one of them,
            or ``scale="shared"`` is asked for a style without a scale of colours.

    >>> import explain
    >>> explainer = explain.Explainer("tiny")
    >>> both = explainer(["assets/chelsea.png", "assets/coffee.png"], ["gradcam", "saliency"])
    >>> round(explain.figure(both, scale="shared", width_cm=8).get_figwidth() * 2.54)
    8
    """
    check_choice("scale", scale, get_args(Scale))
    check_choice("order", order, get_args(Order))
    rows = [explanations] if isinstance(explanations, Explanation) else list(explanations)
    if not rows or not all(isinstance(row, Explanation) for row in rows):
        raise ExplainError(
            f"explanations must be a list of explanations, got {shown(explanations)}; explain some "
            "photos first"
        )
    if methods is None:
        methods = [name for name in rows[0] if all(name in row for row in rows)]
    if order == "family":
        families = list(FAMILIES)
        methods = sorted(methods, key=lambda name: families.index(innermost_method(name).family))
    targets = [row._target(target) for row in rows]
    maps: list[list[Attribution]] = []
    looks: list[Look] = []
    scenes: list[Scene] = []
    for row, index in zip(rows, targets, strict=True):
        attributions = [row._attribution(name, index) for name in methods]
        look = row._look(attributions, **options)
        maps.append(attributions)
        looks.append(look)
        scenes.append(row.fitted_scene(LARGEST_SIDE, look, crop))
    # of each method: the style of each photo's map, and the ends of a shared scale
    styles_and_ends = [
        _styles(of_method, looks, scenes, scale) for of_method in zip(*maps, strict=True)
    ]
    # of shared scales, by column: a method has two columns where its photo comes without a set
    legends: dict[int, Legend] = {}
    groups = []
    for number, (row, index, scene) in enumerate(zip(rows, targets, scenes, strict=True)):
        tiles = [Tile(overlays.outlined(scene.photo, scene.detected), "photo")]
        for attribution, (styles, ends) in zip(maps[number], styles_and_ends, strict=True):
            for tile in pictures.tiles_of(scene, attribution, styles[number], target=index):
                column = len(tiles)
                # the same legend in all rows of a column
                if ends and tile.legend is not None:
                    legends.setdefault(column, replace(tile.legend, labels=ends))
                tiles.append(replace(tile, legend=legends.get(column, tile.legend)))
        groups.append(Group("".join(row._title(index)), tuple(tiles), own_row=True))
    layout = Layout("", "", tuple(groups), abreast=figures.abreast(width_cm, is_table=True))
    alternative = "; ".join(row.alternative for row in rows)
    return figures.figure_of(layout, alternative, width_cm=width_cm, letters=letters, heading=False)


def _styles(
    column: Sequence[Attribution], looks: Sequence[Look], scenes: Sequence[Scene], scale: Scale
) -> tuple[list[Style], tuple[str, ...]]:
    """The style of each map of one method, and the ends of their shared scale in the unit of the
    values; of scales of their own, no ends."""
    styles = [look.of(attribution.style) for attribution, look in zip(column, looks, strict=True)]
    if scale == "own":
        return styles, ()
    colored = [style for style in styles if isinstance(style, Colored)]
    if len(colored) < len(styles):
        raise ExplainError(
            f"scale must be 'own' for the style {styles[0].name!r}, which has no scale of colours, "
            "got 'shared'; take the style heat"
        )
    largest = [
        scene.largest(attribution, style)
        for scene, attribution, style in zip(scenes, column, colored, strict=True)
    ]
    end = max(largest) or 1.0
    # a map with smaller values gets the beginning of the colours alone
    shared: list[Style] = [
        replace(style, share=value / end) for style, value in zip(colored, largest, strict=True)
    ]
    low = f"−{end:.2g}" if colored[0].reads == "signed" else "0"
    return shared, (low, f"{end:.2g}")
