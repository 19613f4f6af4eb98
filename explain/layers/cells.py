"""`cell_centres`: where in the image the cells of a layer's feature map look."""

from torch import Tensor, nn

from explain._utils.errors import LayerError, shown
from explain.data.inputs import InputsLike, as_inputs
from explain.layers.grids import NetworkGrids


def cell_centres(model: nn.Module, x: InputsLike, layer: str) -> Tensor:
    """Where in the image each cell of a layer's feature map looks: ``(h, w, 2)``, row and column in
    pixels.

    A cell looks at the centre of its squared gradient in the pixels, which is estimated from the
    weights (`explain.layers.receptive_fields`); it is seldom the middle of its share of the image.
    The border of the image cuts fields, so that cells there look further inwards than they are
    drawn (`Attribution.placement`): an object that is moved by a stride moves the map by a cell.
    Cells that look nowhere have NaN. The network runs once, on the first image of ``x`` ``(N, C, H,
    W)``.

    Raises:
        LayerError: the layer has no map of images, or an operation before it has no rule.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU())
    >>> cell_centres(model, torch.ones(1, 1, 8, 8), "0")[1, :, 1].round().tolist()
    [1.0, 2.0, 4.0, 6.0]
    """
    grids = NetworkGrids(model, as_inputs(x).first().detached())
    looks = grids.look(layer, cut=True)
    if looks is None:
        raise LayerError(
            f"layer must give a map of the image, got {shown(layer)}; explain.list_layers shows "
            "which do"
        )
    if looks.placement is None:
        raise LayerError(
            f"layer must be followed back to the image, got {shown(layer)} behind {looks.behind}; "
            "choose an earlier layer"
        )
    return looks.placement.centres[0]
