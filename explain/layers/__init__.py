"""Layers: their names, the maps they return, and which one to explain by default.

    layouts        the grid of a tensor's map in any layout: what a shape leaves open, and how the positions of its
                   values decide it; feature maps, laid out and enlarged
    calls          the calls that a network makes of its modules, what they return, and which one a name stands for
    default_layer  the layer to explain by default

A feature map reaches a method as ``(N, C, h, w)``, of a video as ``(N, C, t, h, w)``, no matter how the network lays it
out: channels-last maps (Swin) are transposed, and token sequences (ViT) are laid out on their grid without class,
register and detection tokens, wherever these stand.
"""

from explain.layers.calls import list_layers
from explain.layers.default_layer import default_layer

__all__ = ["default_layer", "list_layers"]
