"""What a room needs of rooms below it, which it does not know: the package, which knows all rooms,
says where it is."""

from collections.abc import Callable
from typing import Any

grids_of_photo: Callable[[Any, Any], Any]
"""From a model and its inputs to how tokens and cells lie on the photo; see `PhotoGrids` of
`explain.layers.grids`."""
