"""Photos that a processor has cut into patches (Qwen2-VL and its relatives), laid out as photos
again.

Such a model takes ``pixel_values`` ``(patches, values)`` of all photos, and ``image_grid_thw`` with
the frames, rows and columns of each. Maps are of photos ``(N, C, H, W)``: these are given to a copy
of the model that packs them itself.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ImageError
from explain.data.inputs import InputsLike

PIXELS = "pixel_values"
GRID = "image_grid_thw"


def with_photos(model: nn.Module, x: InputsLike) -> tuple[nn.Module, InputsLike]:
    """A model that takes photos ``(N, C, H, W)`` instead of a processor's patches (Qwen2-VL), with
    the same modules, and the photos; model and inputs of other kinds as they are.
    """
    if not (
        isinstance(x, Mapping) and isinstance(x.get(GRID), torch.Tensor) and x[PIXELS].ndim == 2
    ):
        return model, x
    config: Any = model.config.vision_config  # type: ignore[union-attr]
    patch = config.patch_size
    merge = config.spatial_merge_size
    copies = config.temporal_patch_size
    grids = x[GRID].tolist()
    _, rows, columns = grids[0]
    blocks = x[PIXELS].reshape(len(grids), -1, *x[PIXELS].shape[1:])
    if any(grid != [1, rows, columns] for grid in grids) or blocks.shape[1] != rows * columns:
        raise ImageError(
            f"{GRID} must have one image for each prompt, all of one size, got {grids}; explain "
            "one alone"
        )
    # patches come in blocks of merge x merge, each with its channels, copies and pixels
    sizes = len(grids), rows // merge, columns // merge, merge, merge, -1, copies, patch, patch
    # to photos, copies, channels; rows of blocks, of their patches, of pixels; columns of the same
    frames = blocks.reshape(sizes).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    frames = frames.reshape(len(grids), copies, -1, rows * patch, columns * patch)
    if not bool((frames == frames[:, :1]).all()):
        raise ImageError(
            f"{PIXELS} must repeat an image {copies} times, got a video; explain one of its frames"
        )
    model_of_photos = copy.copy(model)  # its modules, parameters and hooks are those of the model
    model_of_photos.forward = partial(_packed, model.forward, merge, patch, copies)
    return model_of_photos, {**x, PIXELS: frames[:, 0]}


def _packed(run: Callable[..., Any], merge: int, patch: int, copies: int, /, **kwargs: Any) -> Any:
    """Run the model's forward on photos cut into patches of ``patch`` pixels, block by block as the
    processor does; ``merge`` patches a side make a token, ``copies`` repeats a photo as frames.
    """
    photos = kwargs[PIXELS]
    count, channels, height, width = photos.shape
    rows = height // (merge * patch)
    columns = width // (merge * patch)
    blocks = photos.reshape(count, channels, rows, merge, patch, columns, merge, patch).permute(
        0, 2, 5, 3, 6, 1, 4, 7
    )
    # (count, rows, columns, merge, merge, channels, copies, patch, patch), as in `with_photos`
    repeated = blocks.unsqueeze(6).expand(*blocks.shape[:6], copies, patch, patch)
    return run(**{**kwargs, PIXELS: repeated.reshape(count * rows * columns * merge**2, -1)})
