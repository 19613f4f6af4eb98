"""Layers: their names, the maps they return, and which one to explain by default.

Five questions are asked from outside, each of one module:

    summary        what ran? `summary_of`: the calls of modules for one image, kept as long as the
                   network is the same; which of them a name stands for
    grids          how do maps lie on the input? `NetworkGrids`, for the layers of a network
    default_layer  which layer is explained? `default_layer`, or for several `stage_layers`
    costs          what share of a pass follows a layer? `cost_after`
    cells          where in the image does each cell of a map look? `cell_centres`

These modules answer them:

    recording      the calls that a network makes of its modules, as they happen
    layouts        the grid of a tensor's map in any layout: what a shape leaves open, and how the
                   positions of its values decide it; feature maps, laid out and enlarged
    located        where in the image values lie, where shapes leave it open
    positions      the same, followed through the operations of a recording
    receptive_fields  moments of what each value looks at, followed in the same way
    seen           what of an image a network reads: a crop of it, and which pixels
    influence      how layers reach a score, by which the default layer is chosen
    frames         where videos have their channels
    stitched       a segmenter on windows of an image

A feature map reaches a method as ``(N, C, h, w)``, of a video as ``(N, C, t, h, w)``, no matter how
the network lays it out: channels-last maps (Swin) are transposed, and token sequences (ViT) are
laid out on their grid without class, register and detection tokens, wherever these stand.
"""

from explain.layers.cells import cell_centres
from explain.layers.default_layer import default_layer
from explain.layers.summary import list_layers

__all__ = ["cell_centres", "default_layer", "list_layers"]
