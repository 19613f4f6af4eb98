"""Models in files: TorchScript, exported programs and ONNX, of which the scores alone are known."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from explain._utils.errors import ModelError, optional, quiet

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2", ".onnx")
"""The ends of the names of files that `load_file` reads."""
Scores = Callable[[torch.Tensor], Any]


class BlackBox(nn.Module):
    """A network of which nothing but its output is known; layers and operations are not there to be
    explained.

    ``shape`` is that of the input that it was made for, with None where any length is taken. A
    batch that it was not made for is given to it in parts.

    >>> network = BlackBox(lambda x: x.mean((2, 3)), (1, 3, 8, 8))
    >>> network(torch.rand(5, 3, 8, 8)).shape
    torch.Size([5, 3])
    """

    hidden_layers = True

    def __init__(
        self, scores: Scores, shape: tuple[int | None, ...] = (None, None, None, None)
    ) -> None:
        """Take the function ``scores``, from inputs to class scores, and the input ``shape`` of the
        file, None where any length is taken."""
        super().__init__()
        self.scores = scores
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        """The scores of ``x`` ``(N, C, H, W)``; a batch of another length than the file was made
        for is run in parts of that length, the last filled up with copies."""
        rows = self.shape[0]
        if rows in (None, len(x)):
            return self.scores(x)
        filled = torch.cat([x, x[-1:].expand(-len(x) % rows, *x.shape[1:])])
        return torch.cat([self.scores(part) for part in torch.split(filled, rows)])[: len(x)]


def as_module(model: Any) -> Any:
    """Return a scripted module or an exported program as a module that can be called like any
    other, but hides its layers; anything else as it is."""
    if isinstance(model, torch.jit.ScriptModule):
        return nn.Sequential(model)
    if isinstance(model, ExportedProgram):
        names = model.graph_signature.user_inputs
        x = next(node for node in model.graph.nodes if node.name in names)
        return BlackBox(model.module(), _fixed(x.meta["val"].shape))
    return model


def _fixed(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """A shape in a file, with None for the lengths that may vary."""
    return tuple(side if isinstance(side, int) else None for side in shape)


def load_file(path: Path) -> nn.Module:
    """Read a TorchScript file, an exported program (.pt2) or an ONNX model (.onnx).

    Raises:
        ModelError: there is no such file, it is of another kind, or onnxruntime is not installed.
    """
    if not path.is_file():
        raise ModelError(f"model {str(path)!r} must be a file, but there is none; check the path")
    suffix = path.suffix.lower()
    try:
        with quiet():
            if suffix == ".onnx":
                return _onnx(path)
            return as_module(torch.export.load(path) if suffix == ".pt2" else torch.jit.load(path))  # type: ignore[no-untyped-call]
    except ModelError:
        raise
    except Exception as error:  # a damaged file may break the reader anywhere
        kind = {".onnx": "an ONNX model", ".pt2": "an exported program"}.get(
            suffix, "a TorchScript file"
        )
        reason = " ".join(str(error).split())[:100]
        raise ModelError(
            f"model {str(path)!r} must be {kind}, but cannot be read ({reason}); a state dict "
            "is given as weights of a model"
        ) from None


def _onnx(path: Path) -> BlackBox:
    """Read an ONNX model as a `BlackBox` that onnxruntime runs on the CPU, from its first input to
    its first output, without gradients."""
    runtime = optional("onnxruntime", f"for the model {str(path)!r}", "onnx", ModelError)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x_info = session.get_inputs()[0]

    def scores(x: torch.Tensor) -> torch.Tensor:
        outputs = session.run(None, {x_info.name: x.detach().cpu().numpy()})
        return torch.from_numpy(outputs[0]).to(x.device)

    return BlackBox(scores, _fixed(x_info.shape))


TIMM = "timm:"


def is_file_or_code(name: str) -> bool:
    """Whether loading a model of this name runs a file, or a function that the name says.

    >>> [
    ...     is_file_or_code(name)
    ...     for name in ("tiny", "timm:resnet18.a1_in1k", "./x.pt2", "a.b:make", "timm:hf-hub:a/b")
    ... ]
    [False, False, True, True, True]
    """
    return ":" in name.removeprefix(TIMM) or Path(name).suffix.lower() in SUFFIXES
