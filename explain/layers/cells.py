"""`cell_centres`: where in the photo the cells of a layer's feature map look."""

import torch
from torch import Tensor, nn

from explain._utils.errors import LayerError, shown
from explain._utils.modules import modules_of, submodule
from explain.data.inputs import InputsLike, as_inputs
from explain.hooks.layer_names import place_of
from explain.layers.grids import NetworkGrids
from explain.layers.located import record_calls
from explain.layers.receptive_fields import centres, receptive_fields
from explain.layers.recording import last_of_place


def cell_centres(model: nn.Module, x: InputsLike, layer: str) -> Tensor:
    """Where in the photo each cell of a layer's feature map looks: ``(h, w, 2)``, row and column in
    pixels.

    A cell looks at the centre of its squared gradient in the pixels, which is estimated from the
    weights (`explain.layers.receptive_fields`); it is seldom the middle of its share of the photo.
    Cells that look nowhere have NaN. The network runs once, on the first image of ``x`` ``(N, C, H,
    W)``.

    Raises:
        LayerError: the layer has no map of photos, or an operation before it has no rule.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU())
    >>> cell_centres(model, torch.ones(1, 1, 8, 8), "0")[1, :, 1].round().tolist()
    [1.0, 2.0, 4.0, 6.0]
    """
    inputs = as_inputs(x).first().detached()
    grids = NetworkGrids(model, inputs)
    place = place_of(layer, model)
    place = place._replace(module=modules_of(model)[submodule(model, place.module)])
    recorder, photo, values = record_calls(model, inputs)
    value = last_of_place(values, place)
    grid = None if value is None else grids.grid(value.shape, layer)
    if value is None or grid is None or len(grids.size) != 2:
        raise LayerError(
            f"layer must give a map of the photo, got {shown(layer)}; explain.list_layers shows "
            "which do"
        )
    fields, unknown = receptive_fields(recorder.steps, photo)
    if value not in fields:
        names = ", ".join(unknown) or "what it does with the photo"
        raise LayerError(
            f"layer must be followed back to the photo, got {shown(layer)} behind {names}; choose "
            "an earlier layer"
        )
    where = centres(fields[value], value.shape)
    rows, columns = (grid.spread(axis).nanmean((0, 1)) for axis in where)
    return torch.stack([rows, columns], -1)
