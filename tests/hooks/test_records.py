from __future__ import annotations

import pytest
import torch
from torch import nn

from explain import HookError, LayerError
from explain.hooks import HookGroup, capture
from explain.hooks.capturing import Capture


def test_layers_without_usable_output_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self, result: object) -> None:
            super().__init__()
            self.result = result

        def forward(self, x: torch.Tensor) -> object:
            return self.result

    for result, message in (
        ("text", "must return a tensor, got str"),
        (torch.ones(1).long(), "floating-point"),
    ):
        model = nn.Sequential(Odd(result))
        with pytest.raises(LayerError, match=message), HookGroup(model) as group:
            Capture(group, ["0"], gradients=True)
            model(torch.ones(1))


def test_gradients_that_are_neither_on_nor_off_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    with pytest.raises(HookError), capture(model, "0", gradients="full_backward"):  # type: ignore[arg-type]
        model(torch.ones(1, 2))
