"""Incremental inference where one name of a tensor is overwritten and another one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explain.engine.incremental_maps import BoxMaps, PhotoPass, changed_box

ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda h: h,
    "dropout": lambda h: F.dropout(h, 0.1, training=False),
    "view": lambda h: h.view(h.shape),
    "permute": lambda h: h.permute(0, 2, 3, 1),
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "channels last": lambda h: h.contiguous(memory_format=torch.channels_last),
    "chunk": lambda h: h.chunk(2, 1)[0],
    "slice": lambda h: h[:, 1:3],
    "einsum": lambda h: torch.einsum("bchw->bhwc", h),
    "of a mean": lambda h: h.mean((2, 3), keepdim=True).expand_as(h).clone().view(len(h), -1),
}
WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "clamp_": lambda y, most: y.clamp_(max=most),
    "-=": lambda y, most: y.__isub__(F.relu(y - most)),
    "foreach": lambda y, most: torch._foreach_clamp_max_([y], most),
    "numpy": lambda y, most: y.numpy().clip(max=most, out=y.numpy()),
    "data is set": lambda y, most: setattr(y, "data", y.clamp(max=most)),
    "hardtanh": lambda y, most: F.hardtanh(y, -1e3, most, inplace=True),
}


@torch.no_grad()
@pytest.mark.parametrize("write", WRITES)
def test_an_overwritten_alias_is_followed_or_the_pass_is_given_up(write: str) -> None:
    """A tensor is overwritten by one of two names where it is above ``most``, and read by both."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1).double()
    head = nn.Conv2d(4, 2, 3).double()
    x = torch.rand(1, 3, 12, 12, dtype=torch.double)
    perturbed = x.repeat(3, 1, 1, 1)
    perturbed[1:, :, 3:6, 4:8] *= 9
    box = changed_box(x, torch.zeros(3, dtype=torch.long), perturbed)
    assert box is not None
    # what is overwritten shows in later rows alone
    most = 1.01 * float(conv(x).abs().max())
    followed = 0
    for number, (name, alias) in enumerate(ALIASES.items()):

        def run(x: Tensor, alias: Any = alias, first: bool = number % 2 == 0) -> Tensor:
            h = conv(x)
            y = alias(h)
            WRITES[write](h if first else y, most)
            read = head(h.relu()).mean((2, 3))
            return torch.cat([read, y.reshape(len(x), -1).sum(1, keepdim=True)], 1)

        expected = run(perturbed.clone())
        try:
            scores = run(BoxMaps(box, PhotoPass([])))
        except (RuntimeError, AttributeError):  # it is run as a whole then
            continue
        torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12, msg=name)
        followed += 1
    assert followed
