"""Pictures of maps, from arrays and PIL images.

styles     where a map lies on a photo, and how it is drawn; colour maps by name
overlays   a map, or several concepts, drawn on the photo; films of frames or slices
captions   texts, legends and check marks below a picture
sheets     contact sheets and tables of pictures
figures    the same as figures of matplotlib, for print; plots of signals
"""

from explain.render.figures import plot
from explain.render.overlays import film, overlay
from explain.render.styles import Contour, Heat, Mask, Spotlight

__all__ = ["Contour", "Heat", "Mask", "Spotlight", "film", "overlay", "plot"]
