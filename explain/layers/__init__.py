"""Layers: their names, the maps they return, and which one to explain by default.

    grid where the map of a tensor lies, in any layout
    readings  how a shape may be read as a map, and what it leaves open
    spatial   the maps of a network's layers, laid out and enlarged
    probe     which reading is right, by altering the input
    notes what the modules of a network return in one pass
    calls     the calls that the modules of a network make, and which layer a name stands for
    channels  how many channels the maps of layers have
    shares    which part of a pass lies behind a layer
    choice    the layer to explain by default

A feature map reaches a method as ``(N, C, h, w)``, of a video as ``(N, C, t, h, w)``, no matter how the network lays it
out: channels-last maps (Swin) are transposed, and token sequences (ViT) are laid out on their grid without class and
register tokens.
"""

from explain.layers.calls import (
    channels_of,
    find_layers,
    forget,
    grids_of,
    list_layers,
    look_follows,
    of_other_images,
    shares_behind,
    split_call,
)
from explain.layers.default_layer import default_layer, stage_layers
from explain.layers.feature_maps import Grids, enlarge, to_spatial
from explain.layers.layouts import Grid, find_grid
from explain.layers.outputs import ModuleCall, Ran

__all__ = [
    "Grid",
    "Grids",
    "ModuleCall",
    "Ran",
    "channels_of",
    "default_layer",
    "enlarge",
    "find_grid",
    "find_layers",
    "forget",
    "grids_of",
    "list_layers",
    "look_follows",
    "of_other_images",
    "shares_behind",
    "split_call",
    "stage_layers",
    "to_spatial",
]
