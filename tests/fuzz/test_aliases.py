"""Incremental inference where one name of a tensor is overwritten and another one is read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explain.engine.incremental_maps import BoxMaps, PhotoPass, changed_box

ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda h: h,
    "clone": lambda h: h.clone(),
    "dropout": lambda h: F.dropout(h, 0.1, training=False),
    "view": lambda h: h.view(h.shape),
    "reshape": lambda h: h.reshape(len(h), -1),
    "permute": lambda h: h.permute(0, 2, 3, 1),
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "contiguous": lambda h: h.contiguous(),
    "channels last": lambda h: h.contiguous(memory_format=torch.channels_last),
    "chunk": lambda h: h.chunk(2, 1)[0],
    "unbind": lambda h: h.unbind(1)[0],
    "slice": lambda h: h[:, 1:3],
    "einsum": lambda h: torch.einsum("bchw->bhwc", h),
    "of a mean": lambda h: h.mean((2, 3), keepdim=True).expand_as(h).clone().view(len(h), -1),
}
WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "clamp_": lambda y, most: y.clamp_(max=most),
    "where, copy_": lambda y, most: y.copy_(torch.where(y > most, most, y)),
    "-=": lambda y, most: y.__isub__(F.relu(y - most)),
    "foreach": lambda y, most: torch._foreach_clamp_max_([y], most),
    "numpy": lambda y, most: y.numpy().clip(max=most, out=y.numpy()),
    "data is set": lambda y, most: setattr(y, "data", y.clamp(max=most)),
    "hardtanh": lambda y, most: F.hardtanh(y, -1e3, most, inplace=True),
}


class Overwrites(nn.Module):
    """Overwrites a tensor by one of two names where it is above ``most``, and reads it by both."""

    def __init__(self, alias: str, write: str, *, first: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 3)
        self.alias = ALIASES[alias]
        self.write = WRITES[write]
        self.first = first
        self.most = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        y = self.alias(h)
        self.write(h if self.first else y, self.most)
        read = self.head(h.relu() if len(h) == len(x) else h.transpose(0, 1).relu())
        return torch.cat([read.mean((2, 3)), y.reshape(len(x), -1).sum(1, keepdim=True)], 1)


@pytest.mark.parametrize("write", WRITES)
def test_an_overwritten_alias_is_followed_or_the_pass_is_given_up(write: str) -> None:
    followed = 0
    number = list(WRITES).index(write)
    for alias, first in zip(ALIASES, cycle([number % 2 == 0, number % 2 == 1])):
        torch.manual_seed(0)
        model = Overwrites(alias, write, first=first).double().eval()
        x = torch.rand(1, 3, 12, 12, dtype=torch.double)
        perturbed = x.repeat(3, 1, 1, 1)
        perturbed[1:, :, 3:6, 4:8] *= 9
        box = changed_box(x, torch.zeros(3, dtype=torch.long), perturbed)
        assert box is not None
        with torch.no_grad():
            # what is overwritten shows in later rows alone
            model.most = 1.01 * float(model.conv(x).abs().max())
            expected = model(perturbed.clone())
            try:
                found = model(BoxMaps(box, PhotoPass([])))
            except (RuntimeError, AttributeError):  # it is run as a whole then
                continue
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=f"{alias}, {first}")
        followed += 1
    assert followed
