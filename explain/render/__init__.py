"""Pictures from arrays and PIL images; this room knows no models or methods.

colors     colour maps by name, and the colours of some as numbers
placement  where a map lies on a photo, and where most of its evidence lies
styles     heat, contour, mask, spotlight, and the own styles of pixel methods: plain values that draw
overlay    a map on its photo, with what the model did not see
text       the font, and texts that fit
captions   legends, marks, and a strip of words under a picture
concepts   several maps in one picture
sheets     contact sheets, as values and as pictures
figure     contact sheets as matplotlib figures
"""

from explain.render.captions import Legend, Mark, bar, caption, enlargement
from explain.render.colors import HEAT, SIGNED, colorize
from explain.render.concepts import concepts
from explain.render.figure import figure
from explain.render.overlay import drawn, overlay
from explain.render.placement import smoothed, thresholds
from explain.render.sheets import Group, Layout, Tile, sheet, table
from explain.render.styles import (
    CHOICES,
    Color,
    Contour,
    Heat,
    Intensity,
    Mask,
    Signed,
    SignedContour,
    Spotlight,
    Style,
    StyleLike,
    get_style,
    with_options,
)

__all__ = [
    "CHOICES",
    "HEAT",
    "SIGNED",
    "Color",
    "Contour",
    "Group",
    "Heat",
    "Intensity",
    "Layout",
    "Legend",
    "Mark",
    "Mask",
    "Signed",
    "SignedContour",
    "Spotlight",
    "Style",
    "StyleLike",
    "Tile",
    "bar",
    "caption",
    "colorize",
    "concepts",
    "drawn",
    "enlargement",
    "figure",
    "get_style",
    "overlay",
    "sheet",
    "smoothed",
    "table",
    "thresholds",
    "with_options",
]
