"""Models in files: TorchScript, exported programs and ONNX, of which the scores alone are known;
checkpoints of ultralytics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from explain._utils.errors import (
    ImageError,
    ModelError,
    optional,
    python_or_command,
    quiet,
    reason_of,
)
from explain.data.inputs import BRIGHT, COLOURS
from explain.hooks.programs import OpenProgram, is_program
from explain.models.from_ultralytics import load_checkpoint
from explain.models.weights import check_file

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2", ".onnx")
"""The ends of the names of files that `load_file` reads."""
Scores = Callable[[torch.Tensor], Any]


class BlackBox(nn.Module):
    """A network of which only the output is known: it has no layers and operations to explain. A
    batch that it was not made for is given to it in parts."""

    hidden_layers = True

    def __init__(
        self,
        scores: Scores,
        shape: tuple[int | None, ...] = (None, None, None, None),
        *,
        takes_levels: bool = False,
    ) -> None:
        """``scores`` maps inputs of ``shape`` (None for any length) to class scores;
        ``takes_levels`` says that it makes whole levels of inputs from 0 to 1.
        """
        super().__init__()
        self.scores = scores
        self.shape = shape
        self.takes_levels = takes_levels

    def forward(self, x: torch.Tensor) -> Any:
        """The scores of ``x`` ``(N, C, H, W)``; a batch of another length than the file was made
        for is run in parts of that length, the last filled up with copies."""
        length = self.shape[0]
        if length in (None, len(x)):
            return self.scores(x)
        lacking = -len(x) % length  # images that the last part is short of
        filled = torch.cat([x, x[-1:].expand(lacking, *x.shape[1:])])
        return torch.cat([self.scores(part) for part in torch.split(filled, length)])[: len(x)]


def as_module(model: Any) -> Any:
    """Return a scripted module or an exported program as a module with layers; anything else as it
    is."""
    program = model.module() if isinstance(model, ExportedProgram) else model
    return OpenProgram(program) if is_program(program) else model


def load_file(path: Path) -> nn.Module:
    """Read a TorchScript file, a checkpoint of ultralytics, an exported program (.pt2) or an ONNX
    model (.onnx)."""
    check_file("model", path)
    suffix = path.suffix.lower()
    try:
        with quiet():
            if suffix == ".onnx":
                return _onnx(path)
            return as_module(torch.export.load(path) if suffix == ".pt2" else torch.jit.load(path))  # type: ignore[no-untyped-call]
    except ModelError:
        raise
    except Exception as error:  # a damaged file may break the reader anywhere
        # what is no TorchScript may be a checkpoint
        network = None if suffix in (".onnx", ".pt2") else _pickled(path)
        if network is not None:
            return network
        raise ModelError(
            f"model {str(path)!r} cannot be read as {suffix} ({reason_of(error)}); a state dict is "
            "given as weights of a model"
        ) from None


def _pickled(path: Path) -> nn.Module | None:
    """The network in a checkpoint of ultralytics. Another file of ``torch.save`` is refused by the
    names in it, which say what it holds; none of its code is run. None for other files."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no such file, or a damaged one
        return None
    refusal = f"model {str(path)!r} must be a TorchScript file"
    packages = {name.partition(".")[0] for name in names}
    if not packages:
        raise ModelError(f"{refusal}, got tensors; a state dict is given as weights of a model")
    loading = f"torch.load({str(path)!r}, weights_only=False)"
    if "ultralytics" in packages:
        network = load_checkpoint(path, names)
        if network is not None:
            return network
        # where other classes are in it too, only ultralytics itself can load it
        loading = f"ultralytics.YOLO({str(path)!r}).model"
    pickled = ", ".join(sorted(packages - {"torch"})) or "torch"
    remedy = python_or_command(
        f"give explain.Explainer({loading})", f"give a factory that returns {loading}"
    )
    raise ModelError(
        f"{refusal}, got pickled objects of {pickled}, which run code when they are loaded; if you "
        f"trust it, {remedy}"
    )


_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(uint8)": np.uint8,
}
"""The types of numbers in an ONNX model's input."""


def _onnx(path: Path) -> BlackBox:
    """An ONNX model as a `BlackBox` that onnxruntime runs on the CPU, from its one input to its
    first output. Inputs here are from 0 to 1, channels first, whatever it takes.
    """
    runtime = optional("onnxruntime", f"for the model {str(path)!r}", "onnx", ModelError)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x_info, *more_inputs = session.get_inputs()
    dtype = _DTYPES.get(x_info.type)
    shape = tuple(side if isinstance(side, int) else None for side in x_info.shape)
    if more_inputs or dtype is None or len(shape) != 4:
        inputs = ", ".join(f"{x.name} {x.type} {x.shape}" for x in (x_info, *more_inputs))
        raise ModelError(
            f"model {str(path)!r} must take images (N, C, H, W) alone, got {inputs}; put it into a "
            "module of your own"
        )
    takes_levels = dtype is np.uint8
    channels_last = shape[3] in COLOURS and shape[1] not in COLOURS
    if channels_last:
        batch, height, width, channels = shape
        shape = (batch, channels, height, width)

    def scores(x: torch.Tensor) -> torch.Tensor:
        values = x.detach().cpu()
        if takes_levels:
            if values.max() > BRIGHT:  # these are levels already
                raise ImageError(
                    "x must have values from 0 to 1 for a model of whole levels, which gets 255 "
                    f"times as much, got {values.max():g}; use x / 255"
                )
            values = (255 * values).round().clamp(0, 255)
        if channels_last:
            values = values.movedim(1, -1)
        outputs = session.run(None, {x_info.name: values.contiguous().numpy().astype(dtype)})
        return torch.from_numpy(outputs[0]).to(x.device)

    return BlackBox(scores, shape, takes_levels=takes_levels)


TIMM = "timm:"


def is_file_or_code(name: str) -> bool:
    """Whether loading a model of this name runs a file ("x.pt2") or code ("package.module:factory",
    or what a hub has: "timm:hf-hub:owner/name")."""
    return ":" in name.removeprefix(TIMM) or Path(name).suffix.lower() in SUFFIXES
