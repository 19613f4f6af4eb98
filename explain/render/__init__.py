"""Pictures from arrays and PIL images; this room knows no models or methods.

colors     colour maps by name
tables     the colours of some, as numbers
placing    where a map lies on a photo
evidence   where most of a map's evidence lies
styles     heat, contour, mask, spotlight, and the own styles of pixel methods: plain values that draw
unseen     what the model did not see
overlay    a map on its photo
legend     what colours mean, as values and as a bar
text       the font, and texts that fit
marks      what a picture was asked, and whether it passed
caption    a strip of words under a picture
concepts   several maps in one picture
layout     contact sheets as values
sheet      contact sheets as pictures
figure     contact sheets as matplotlib figures
html       pictures and tables in notebooks
former     names of earlier versions, deprecated
"""

from explain.render.captions import Legend, Mark, bar, caption, enlargement
from explain.render.colors import HEAT, SIGNED, colorize
from explain.render.concepts import concepts
from explain.render.figure import figure
from explain.render.former import color, heat, intensity, signed
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
    "color",
    "colorize",
    "concepts",
    "drawn",
    "enlargement",
    "figure",
    "get_style",
    "heat",
    "intensity",
    "overlay",
    "sheet",
    "signed",
    "smoothed",
    "table",
    "thresholds",
    "with_options",
]
