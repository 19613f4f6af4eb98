"""`ActivationStore`: what layers give over a data set, on disk, read through memory maps.

A folder holds one file of plain numbers for each layer, to which each batch is appended, and ``activations.json``,
which says how many images are complete. After an interruption, what is behind them is cut off, and collecting goes on.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from explain._utils.errors import RunError, shown
from explain.data.files import replacing
from explain.hooks import capture, layer_names, preserve, unwrap
from explain.runs.manifest import digest_of

NAME = "activations.json"
_FIELDS = {"weights", "layers", "dtype", "channels", "tokens", "shapes"}
Kind = Literal["float16", "float32"]


class ActivationStore:
    """Activations of some layers over a data set, in a folder.

    Args:
        folder: where they are; it is made if it is not there.
        model: the model; None only reads.
        layers: names, patterns, modules or classes, also parts of an attention such as ``"blocks.1.attn:pattern"``.
        channels: which channels, for layers that give ``(N, C, ...)``; None takes all.
        tokens: which tokens, for layers that give ``(N, T, C)``; None takes all.
        dtype: "float16" or "float32".

    Raises:
        RunError: the folder holds activations of another model, or of other layers or units, or is damaged.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    >>> folder = tempfile.mkdtemp()
    >>> store = ActivationStore(folder, model, ["1"], channels=[0, 2])
    >>> store.collect(torch.rand(10, 3, 8, 8), batch_size=4)
    >>> ActivationStore(folder)["1"].shape
    (10, 2, 6, 6)
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: nn.Module | None = None, layers: layer_names.Where | None = None,
        *, channels: Sequence[int] | None = None, tokens: Sequence[int] | None = None, dtype: Kind = "float16",
    ) -> None:  # fmt: skip
        if dtype not in ("float16", "float32"):
            raise RunError(f"dtype must be 'float16' or 'float32', got {shown(dtype)}")
        self.folder = Path(folder)
        self._model = None if model is None else unwrap.unwrapped(model)
        about = self._read()
        if self._model is not None:
            if layers is None:
                raise RunError("layers must be named to collect activations, got None")
            wanted = {
                "weights": digest_of(self._model),
                "layers": layer_names.select_places(self._model, layers), "dtype": dtype,
                "channels": None if channels is None else [*channels], "tokens": None if tokens is None else [*tokens],
            }  # fmt: skip
            about = about or {**wanted, "shapes": {}, "done": 0}
            for name, value in wanted.items():
                if about[name] != value:
                    raise RunError(f"folder {str(folder)!r} holds activations of other {name}; choose another folder")
        if about is None:
            raise RunError(f"folder {str(folder)!r} must hold activations to be read, but has none; give a model")
        self._about = about
        self.layers: list[str] = about["layers"]

    def __len__(self) -> int:
        """How many images there are."""
        return int(self._about["done"])

    def __getitem__(self, layer: str) -> np.memmap[Any, Any]:
        """The activations of a layer, ``(N, ...)``, as a memory map: only what is used is read."""
        shape = self._about["shapes"].get(layer)
        if shape is None:
            raise RunError(f"layer must be one of {', '.join(self._about['shapes']) or 'none yet'}, got {shown(layer)}")
        return np.memmap(self._file(layer), dtype=self._about["dtype"], mode="r", shape=(len(self), *shape))

    def collect(
        self, source: torch.Tensor | Iterable[torch.Tensor | Sequence[Any] | Mapping[str, Any]], *,
        batch_size: int = 32, device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        """Run the model on a source, and append what the layers give.

        What is there already is skipped: called again after an interruption, with the same source, it goes on.

        Args:
            source: a tensor ``(N, C, H, W)``, or an iterable of images ``(C, H, W)`` or batches of them, such as a
                DataLoader; of tuples, the first part is the image.
            batch_size: how many images are run at once, where the source gives single ones.
            device: where the images go first.
        """
        if self._model is None:
            raise RunError("store must have a model to collect activations, but was opened for reading; give one")
        self.folder.mkdir(parents=True, exist_ok=True)
        size = len(self) * np.dtype(self._about["dtype"]).itemsize
        for layer in self.layers:  # drop what was appended after the last complete batch
            path, complete = self._file(layer), size * math.prod(self._about["shapes"].get(layer, [0]))
            if path.exists() and path.stat().st_size < complete:
                raise RunError(f"activations {str(path)!r} are shorter than {NAME} says; delete the folder")
            if path.exists():
                os.truncate(path, complete)
        images = islice(_images(source), len(self), None)
        with preserve.untouched(self._model), torch.no_grad():
            while batch := list(islice(images, batch_size)):
                x = torch.stack(batch)
                with capture(self._model, self.layers, gradients=False) as seen:
                    self._model(x if device is None else x.to(device))
                self._append(len(x), seen.activations)

    def _append(self, count: int, activations: Mapping[str, torch.Tensor]) -> None:
        channels, tokens = self._about["channels"], self._about["tokens"]
        for layer in self.layers:
            values = activations[layer]
            if channels is not None:
                values = values[..., channels] if values.ndim == 3 else values[:, channels]
            values = values if tokens is None else values[:, tokens]
            values = values.to(getattr(torch, self._about["dtype"])).cpu().contiguous()
            shape = self._about["shapes"].setdefault(layer, list(values.shape[1:]))
            if len(values) != count or list(values.shape[1:]) != shape:
                raise RunError(f"layer {layer!r} must give one shape, got {values.shape} after {shape}; resize")
            with self._file(layer).open("ab") as file:
                file.write(values.numpy().tobytes())
        self._about["done"] += count
        with replacing(self.folder / NAME) as part:
            part.write_text(json.dumps(self._about), "utf-8")

    def _file(self, layer: str) -> Path:
        return self.folder / f"{self.layers.index(layer):03d}.bin"

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / NAME
        if not path.exists():
            return None
        try:
            found = dict(json.loads(path.read_bytes()))
            damaged = type(found.get("done")) is not int or not found.keys() >= _FIELDS
        except (ValueError, TypeError):
            damaged = True
        if damaged:
            raise RunError(f"file {str(path)!r} must be one that a store wrote, but is damaged") from None
        return found


def _images(source: Any) -> Iterator[torch.Tensor]:
    """The images of a source, one by one."""
    for item in source:
        first = next(iter(item.values())) if isinstance(item, Mapping) else item
        while isinstance(first, (tuple, list)) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) or first.ndim not in (3, 4):
            raise RunError(f"source must give images (C, H, W) or batches (N, C, H, W), got {shown(first)}")
        yield from first if first.ndim == 4 else [first]
