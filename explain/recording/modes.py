"""Modes of torch: what follows or answers the calls of this thread, beside the recorder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from explain.recording.torch_internals import NotForCompilers

GIVING_VALUES = ("numpy", "__array__", "__dlpack__", "tolist", "storage")
"""Methods that give the values of a tensor to somebody else than PyTorch."""
_data: Any = Tensor.data
_PAST_OPERATORS: dict[Any, str] = {_data.__get__: "data", _data.__set__: "data"} | {
    getattr(Tensor, name): name for name in (*GIVING_VALUES, "data_ptr", "untyped_storage", "set_")
}
"""Functions by which memory may be read or overwritten without an operator, or without autograd."""


class Watcher(TorchFunctionMode):
    """Within its block, calls ``tell(name, tensor)`` before each call of this thread that gives
    access to the memory of a tensor. Fused kernels of transformer layers are not used then."""

    def __init__(self, tell: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make a call of PyTorch, and tell of it if it gives access to memory."""
        name = _PAST_OPERATORS.get(func)
        if name is not None:
            self._tell(name, args[0])
        return func(*args, **(kwargs or {}))


class OperatorCalls(NotForCompilers, TorchDispatchMode):
    """Within its block, ``run(operator, args, kwargs)`` runs each operator of this thread, or
    answers with another result."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; meanwhile no mode is shown calls."""
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})
