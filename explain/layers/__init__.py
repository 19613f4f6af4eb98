"""Layers: their names, the maps they return, and which one to explain by default.

    layouts        the grid of a tensor's map in any layout: what a shape leaves open, and how the
                   positions of its values decide it; feature maps, laid out and enlarged
    recording      what ran: the calls that a network makes of its modules, and what they return
    located        where in the photo values lie, where shapes leave it open
    summary        the calls for one image, kept as long as the network is the same; which of them
                   a name stands for
    grids          how the maps of a network's layers lie on its input
    costs          what share of a pass follows a layer
    frames         where videos have their channels
    stitched       a segmenter on windows of a photo
    default_layer  the layer to explain by default
    influence      how layers reach a score, by which it is chosen

A feature map reaches a method as ``(N, C, h, w)``, of a video as ``(N, C, t, h, w)``, no matter how
the network lays it out: channels-last maps (Swin) are transposed, and token sequences (ViT) are
laid out on their grid without class, register and detection tokens, wherever these stand.
"""

from explain.layers.default_layer import default_layer
from explain.layers.summary import list_layers

__all__ = ["default_layer", "list_layers"]
