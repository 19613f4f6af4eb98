"""The caller's default device (`torch.set_default_device`), which tensors of this package do not
follow.

The model and what else is the caller's run with it; what is computed here goes to the device of the
photos by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

CALLERS_DEVICE: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
"""The default device of the caller, where `cpu_by_default` has replaced it."""


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Within this block, make tensors on the CPU where no device is named, and keep the caller's
    default device in `CALLERS_DEVICE`."""
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    token = CALLERS_DEVICE.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        CALLERS_DEVICE.reset(token)
