"""Pictures from arrays and PIL images; this room knows no models, methods or files.

colors     colour maps by name
overlay    maps on photos: heat, intensity, signed, colour
text       captions
legend     several maps in one picture, and what their colours mean
sheet      contact sheets
figure     matplotlib figures
"""

from explain.render.colors import HEAT, SIGNED, colorize
from explain.render.figure import figure
from explain.render.legend import concepts
from explain.render.overlay import check, color, heat, intensity, signed
from explain.render.sheet import sheet
from explain.render.text import caption

__all__ = [
    "HEAT",
    "SIGNED",
    "caption",
    "check",
    "color",
    "colorize",
    "concepts",
    "figure",
    "heat",
    "intensity",
    "sheet",
    "signed",
]
