"""A model, its caller and torch's settings, left exactly as they were found; copies with modes of their own."""

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from explain._utils.errors import HookError, ModelError
from explain._utils.signals import at_fork, changed, lock, shared, signal_safe, temporarily
from explain.hooks.unwrap import modules_of, parameters_of

DEVICES = ("cpu", "cuda")


class _Here(threading.local):
    """What this thread does: whether it is inside `untouched`, with ``create_graph``, and how often in `evaluating`."""

    busy = False
    create_graph = False
    depth = 0


_here = _Here()
_used_threads = False
_EAGER = "eager"

_REMEDIES = {
    "fork-based multiprocessing":
        "gradients must be computed in a process that torch can start threads in, but this one was forked after "
        "others; start it with 'spawn', or name the layer and use a method without gradients such as scorecam",
    "autograd.Function with functorch":
        "layer must run outside torch.vmap and the other transforms of torch.func for gradients; name another layer",
    "use_reentrant=True":
        "model must not use re-entrant checkpoints for gradients, but it does; use checkpoint(use_reentrant=False)",
    "no autograd formula was registered":
        "model must have a derivative for each of its operators, but one has none; "
        "give it one with torch.library.register_autograd, or use occlusion",
    "torch.compile region":
        "an explanation must start outside what torch.compile compiles, but did not; use @torch.compiler.disable",
}  # fmt: skip
"""What to do about errors of torch, by a part of their messages."""


class _InEvaluation:
    """A module that is put in evaluation mode, and gets its own mode back at the end; see `shared`."""

    def __init__(self, module: nn.Module) -> None:
        attributes = vars(module)
        self.module = module
        self.training = module.training  # of a scripted module too
        self.method = attributes.get("train")
        """A ``train`` that the user put in the module itself, if any."""
        self.disturbed = False
        """Whether another thread has called ``train()`` meanwhile."""
        attributes["train"] = MethodType(_train, module)
        if self.training:
            module.training = False

    def __exit__(self, *error: object) -> None:
        vars(self.module).pop("train", None)
        if self.method is not None:
            vars(self.module)["train"] = self.method
        if self.module.training != self.training:
            self.module.training = self.training


def _train(module: nn.Module, mode: bool = True) -> Any:
    """Replaces a module's ``train`` while it is held, to note what another thread wants."""
    with lock:
        held = _held(module)
        method = None if held is None else held.method
        result = type(module).train(module, mode) if method is None else method(mode)
        if held is not None and not _here.depth:
            held.training = module.training
            held.disturbed |= module.training
    return result


_train.__name__ = "train"  # a module that is pickled meanwhile is given its own ``train`` when it is read


def _held(module: nn.Module) -> _InEvaluation | None:
    _, held = changed.get(("mode", id(module)), (0, None))
    return held  # type: ignore[no-any-return]


@signal_safe
def evaluating(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Put every submodule in evaluation mode, and give each its own mode back at the end.

    The flags are set one by one rather than with ``model.eval()``: a network that overrides ``train`` to keep some
    part frozen would otherwise not come back as it was. Threads may share modules: a mode comes back when the last of
    those that needed it changed has ended. If another thread calls ``train()`` or ``eval()`` of the model or a part of
    it meanwhile, that holds afterwards; the list that the block is given then names the modules put in training mode.

    >>> model = nn.Sequential(nn.Dropout())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> model[0].training
    True
    """
    settings = {("mode", id(module)): partial(_InEvaluation, module) for module in modules_of(model)}
    disturbed: list[nn.Module] = []
    held: list[_InEvaluation] = []
    _here.depth += 1
    try:
        with shared(settings):
            held += [changed[key][1] for key in settings]
            yield disturbed
    finally:
        disturbed += [use.module for use in held if use.disturbed]
        _here.depth = max(0, _here.depth - 1)


_MODULE = frozenset(vars(nn.Module())) | {"forward", "train"}
"""What hooks and modes change in a module, and models do not."""


class _WrittenState:
    """What forward passes may write into modules: their buffers, and other attributes of modules that have some.

    Quantisation observers, running averages and counters are such. Normalisations write nothing in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers: list[tuple[nn.Module, dict[str, Any]]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in modules_of(model):
            buffers = module._buffers
            if not buffers or isinstance(module, nn.modules.batchnorm._NormBase):
                continue
            kept = dict(buffers.items())
            self._buffers.append((module, kept))
            self._attributes.append((vars(module), {**vars(module)}))
            for tensor in kept.values():
                if tensor is not None:
                    self._copies.append((tensor, tensor.detach().clone(), _version(tensor)))

    def __exit__(self, *error: object) -> None:
        """Give modules the buffers, the values in these, and the other attributes that they had."""
        for module, kept in self._buffers:
            buffers = module._buffers
            for name in [name for name, tensor in buffers.items() if kept.get(name) is not tensor]:
                if name in kept:
                    buffers[name] = kept[name]
                else:
                    del buffers[name]
        for now, before in self._attributes:
            for name in (now.keys() | before.keys()) - _MODULE:
                if name not in before:
                    del now[name]
                elif now.get(name, now) is not before[name]:
                    now[name] = before[name]
        for tensor, copied, version in self._copies:
            if not _is_same(tensor, copied, version):
                with torch.no_grad():
                    tensor.resize_(copied.shape).copy_(copied)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_same(tensor: torch.Tensor, copied: torch.Tensor, version: int) -> bool:
    try:
        return torch.equal(tensor, copied)
    except RuntimeError:  # not every kind of tensor can be compared
        return _version(tensor) == version


def keeping_state(model: nn.Module) -> AbstractContextManager[None]:
    """Put back what forward passes write into a model, when the last of such blocks that run at one time has ended.

    >>> model = nn.BatchNorm2d(3)
    >>> model.seen = nn.Module()
    >>> model.seen.register_buffer("count", torch.zeros(()))
    >>> with keeping_state(model):
    ...     _ = model.seen.count.add_(1)
    >>> model.seen.count
    tensor(0.)
    """
    return shared({} if is_transforming() else {("state", id(model)): partial(_WrittenState, model)})


@contextmanager
def _restoring_torch(gradients: bool) -> Iterator[None]:
    """Outside inference mode, switch gradients; after errors, restore them, mixed precision and function modes."""
    grad = torch.is_grad_enabled()
    function_modes = torch._C._len_torch_function_stack()
    nesting = _autocast_nesting()
    caching = torch.is_autocast_cache_enabled()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    try:
        with torch.inference_mode(False), recording(gradients):
            yield
    except BaseException:
        torch.set_grad_enabled(grad)
        while torch._C._len_torch_function_stack() > function_modes:
            torch._C._pop_torch_function_stack()
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caching)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
            if not nesting:
                torch.clear_autocast_cache()
        raise


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def preserving_rng(devices: list[torch.device]) -> AbstractContextManager[None]:
    """Give the random generators of the CPU and of ``devices`` their state back at the end.

    The generators belong to the process: numbers that another thread draws meanwhile are drawn again afterwards.
    """
    held = [torch.device("cpu"), *sorted({d for d in devices if d.type == "cuda"}, key=str)]
    return shared({device: partial(_noted_rng, device) for device in held})


def _noted_rng(device: torch.device) -> ExitStack:
    stack = ExitStack()
    if device.type == "cpu":
        stack.callback(torch.set_rng_state, torch.get_rng_state())
    else:
        stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
    return stack


def eager() -> AbstractContextManager[None]:
    """Let compiled modules and functions run as the Python code that they were made from, and compile nothing.

    Compiled code has no layers to hook and no operations to record. The setting belongs to the process: compiled code
    of other threads runs uncompiled meanwhile, with the same results.
    """
    # Where nothing has been compiled yet, loading the compiler would take seconds. There is no function around
    # `set_stance`: torch.compile would look into it.
    compiler = "torch._dynamo" in sys.modules
    return shared({_EAGER: partial(torch.compiler.set_stance, "force_eager")} if compiler else {})


@signal_safe
def untouched(model: nn.Module, *, grad: bool = False, create_graph: bool = False) -> Iterator[None]:
    """Run a model for inspection: in evaluation mode, gradients as given, outside inference mode; then restore all.

    With ``create_graph``, gradients are on, and what is noted of the pass stays in the graph; see `detached`.

    Buffers that the model writes in its forward pass are put back. Parameters, ``.grad`` and ``requires_grad`` are not
    restored because nothing here ever writes to them.

    Raises:
        ModelError: another thread put the model in training mode meanwhile; or torch refuses to compute gradients in
            this process, which was forked from one that had done so.
    """
    global _used_threads
    _used_threads = _used_threads or torch.get_num_threads() > 1
    rng = preserving_rng([p.device for p in parameters_of(model)])
    here = temporarily(_here, busy=True, create_graph=create_graph)
    torch_state = _restoring_torch(grad or create_graph)
    buffers = keeping_state(model)
    try:
        with here, torch_state, eager(), rng, evaluating(model) as disturbed, buffers:
            yield
    except (RuntimeError, HookError) as error:
        remedy = next((_REMEDIES[part] for part in _REMEDIES if part in str(error)), None)
        if remedy is None:
            raise
        raise ModelError(remedy) from None
    if disturbed:
        remedy = "explain a copy of it: explain.hooks.copied(model)"
        raise ModelError(f"model must stay in evaluation mode, but another thread called its train(); {remedy}")


@signal_safe
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Let normalisations run on copies of their statistics: training overwrites these, and a graph would not notice."""
    buffers = [module._buffers for module in modules_of(model) if isinstance(module, nn.modules.batchnorm._NormBase)]
    found = [(each, name, each[name]) for each in buffers for name in ("running_mean", "running_var")]
    try:
        for each, name, buffer in found:
            each[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for each, name, buffer in found:
            each[name] = buffer


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a model's pass without its graph; where `untouched` creates graphs in this thread, as it is."""
    return tensor if _here.create_graph else tensor.detach()


@signal_safe
def calculating(device: str, *, create_graph: bool = False) -> Iterator[None]:
    """Compute without a graph, unless one is wanted, and in the precision of the given tensors, in any mode.

    Tensors that are made here may be changed in place by a model, outside inference mode.

    >>> with calculating("cpu"):
    ...     torch.is_grad_enabled()
    False
    """
    with _restoring_torch(create_graph), torch.autocast(device, enabled=False):
        yield


@signal_safe
def recording(grad: bool) -> Iterator[None]:
    """Switch gradients on or off; afterwards they are as they were, even if the block raises or is interrupted.

    ``torch.set_grad_enabled`` does the same, but an interrupt while it ends leaves gradients switched.
    """
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(grad)
    try:
        yield
    finally:
        torch.set_grad_enabled(before)


def is_under_way() -> bool:
    """Whether this thread is inside an `untouched` block."""
    return _here.busy


def is_transforming() -> bool:
    """Whether this runs inside a transform of `torch.func` (`vmap`, `grad`, `jvp`), where tensors are proxies."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_proxy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a transform of `torch.func` shows as a proxy; any other as it is.

    >>> x = torch.ones(2, 3)
    >>> torch.vmap(lambda row: row * without_proxy(row).requires_grad)(x.requires_grad_()).sum().item()
    6.0
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def copied(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy a model, for a thread that explains it while another one trains it or switches its modes.

    The copy has modes, hooks and weights of its own. Hooks that the user has registered on the model go with it, since
    they may be part of what it computes; those of `HookGroup` do not. It is the model as it is now: copy it between
    two steps of training, and again when the weights have changed. Name its layers, since modules of the original are
    not part of it.

    Args:
        model: any module that ``copy.deepcopy`` can copy.
        share: share parameters and buffers with the model, which costs no memory and follows every change of them.
            This is for threads that switch modes, not for those that train: where weights change between an
            explanation's forward and backward pass, PyTorch raises a RuntimeError.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> other = copied(model).eval()
    >>> model.training, other[0].weight is model[0].weight
    (True, False)
    >>> copied(model, share=True)[0].weight is model[0].weight
    True
    """
    while True:
        try:
            with torch.inference_mode(False):  # tensors made in that mode could never have gradients
                return _copied(model, share)
        except RuntimeError as error:
            if "during iteration" not in str(error):  # another thread was just registering hooks
                raise


def _copied(model: nn.Module, share: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:  # parameters, buffers, and what hooks compute from them
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and (share or not tensor.is_leaf):  # which deepcopy refuses
                memo[id(tensor)] = tensor if share else tensor.detach().clone()
    copied_model = copy.deepcopy(model, memo)
    with lock:
        for module in modules:  # each copy gets the mode that its original has when it is not held
            twin = memo.get(id(module))
            held = _held(module)
            if isinstance(twin, nn.Module) and twin is not module and held is not None:
                train = vars(twin).pop("train", None)
                if held.method is not None and train is not None:
                    vars(twin)["train"] = held.method
                twin.training = held.training
    return copied_model


def _begin_child() -> None:
    """Be as if nothing were under way, in a process that has just been forked.

    Threads of OpenMP do not survive a fork, and code that then counts on them waits forever; so, if there may have
    been some, the child computes with one thread, as the workers of a DataLoader do.
    """
    _here.busy = False
    _here.create_graph = False
    _here.depth = 0
    if _used_threads:
        torch.set_num_threads(1)


at_fork(after_in_child=_begin_child)
