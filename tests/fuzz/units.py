"""Attacks by units: scores in other units and another default dtype of the caller change no map but for its unit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import explain
from explain import ExplainError, ExplainWarning
from tests.fuzz.programs import Network, Program, scores_in

PROPORTIONAL = [
    "saliency", "inputxgradient", "guidedbackprop", "deconvnet", "integratedgradients", "expectedgradients",
    "gradientshap", "smoothgrad", "deeplift", "lrp", "attnlrp", "gradcam", "hirescam", "layercam", "occlusion", "lime",
]  # fmt: skip
"""Methods whose maps have the unit of the score."""


class InUnits(nn.Module):
    """A network whose class scores are multiplied with a number."""

    def __init__(self, network: nn.Module, factor: float) -> None:
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return scores_in(self.network(*inputs)) * self.factor


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype, for as long as it lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check(program: Program, names: Sequence[str] = PROPORTIONAL) -> list[str]:
    """Explain a program in several units, and under another default dtype; say which methods give another map."""
    g, network = torch.Generator().manual_seed(program.seed), Network(program).double().eval()
    x = tuple(torch.randn(2, *shape, generator=g, dtype=torch.float64) for shape in program.inputs)
    wrong = []
    for name in names:
        expected = _map(InUnits(network, 1.0), x, name)
        if isinstance(expected, str):
            continue
        size = float(expected.abs().max())
        for exponent in (-40, 20):
            found = _map(InUnits(network, 2.0**exponent), x, name)
            if isinstance(found, str) or not _same(found / 2.0**exponent, expected, size):
                wrong.append(f"{name} of scores times 2**{exponent}: {found if isinstance(found, str) else 'off'}")
        with default_dtype(torch.float32 if torch.get_default_dtype() == torch.float64 else torch.float64):
            found = _map(InUnits(network, 1.0), x, name)
        if isinstance(found, str) or not _same(found, expected, size):
            wrong.append(f"{name} under another default dtype")
    return wrong


def _same(found: torch.Tensor, expected: torch.Tensor, size: float) -> bool:
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-10 * size)


def _map(model: nn.Module, x: tuple[torch.Tensor, ...], name: str) -> torch.Tensor | str:
    """The map of the first class, or what was refused."""
    given: Any = x[0] if len(x) == 1 else explain.Inputs(x)
    options: Any = {"samples": 100} if name == "lime" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExplainWarning)
        try:
            return explain.attribute(model, given, name, target=0, **options).values
        except ExplainError as error:
            return str(error)
