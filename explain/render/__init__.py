"""Pictures of maps, from arrays and PIL images.

styles     how a map is drawn on a photo: heat, contour, mask, spotlight, and the styles of pixel methods
overlays   a map, or several concepts, drawn on the photo
placement  where a map lies on a photo, and where most of its evidence lies
colors     colour maps by name
captions   texts, legends and check marks below a picture
sheets     contact sheets and tables of pictures
figure     contact sheets as matplotlib figures
"""

from typing import TYPE_CHECKING

from explain._utils.errors import getattr_of
from explain.render.overlays import overlay
from explain.render.styles import Contour, Heat, Mask, Spotlight

__all__ = ["Contour", "Heat", "Mask", "Spotlight", "overlay"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of("render")
