"""A model, its caller and torch's settings, left exactly as they were found; copies with modes of
their own."""

import copy
import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn

from explain._utils.default_device import CALLERS_DEVICE
from explain._utils.errors import ExplainError, HookError, ModelError
from explain._utils.modules import module_names, modules_of, parameters_of
from explain._utils.signals import Shared, SignalSafe, at_fork, lock, signal_safe
from explain.hooks.handles import Registered, acting

DEVICES = ("cpu", "cuda")


class _Current(threading.local):
    """The innermost block of `untouched` that this thread is in."""

    block: "_LeftAsFound | None" = None


_current = _Current()
_used_threads = False
_EAGER = "eager"
_FAST_PATH = "fast path"
_CPU = torch.device("cpu")

_DISTURBED = (
    "model must stay in evaluation mode, but another thread called its train(); explain a copy of "
    "it: explain.hooks.copied(model)"
)
_REMEDIES = {
    "fork-based multiprocessing": (
        "gradients must be computed in a process that torch can start threads in, but this one was "
        "forked after others; start it with 'spawn', or name the layer and use a method without "
        "gradients such as scorecam"
    ),
    "autograd.Function with functorch": (
        "layer must run outside torch.vmap and the other transforms of torch.func for gradients; "
        "name another layer"
    ),
    "use_reentrant=True": (
        "model must not use re-entrant checkpoints for gradients, but it does; use "
        "checkpoint(use_reentrant=False)"
    ),
    "no autograd formula was registered": (
        "model must have a derivative for each of its operators, but one has none; give it one "
        "with torch.library.register_autograd, or use occlusion"
    ),
    "torch.compile region": (
        "an explanation must start outside what torch.compile compiles, but did not; use "
        "@torch.compiler.disable"
    ),
}
"""What to do about errors of torch, by a part of their messages."""


@dataclass(eq=False)
class _HeldMode:
    """A module that is put in evaluation mode, for one or several blocks, and gets its own mode
    back after the last."""

    module: nn.Module
    training: bool
    """The module's own mode."""
    blocks: int = 0
    disturbed: bool = False
    """Whether another thread has called ``train()`` meanwhile."""
    guard: "_Guard | None" = None
    """Of a normalisation, once another thread has called ``train()``."""

    def disturb(self) -> None:
        """Note that another thread calls ``train()``, just before it does: normalisations write
        their statistics from now on."""
        self.disturbed = True
        if self.guard is None and isinstance(self.module, nn.modules.batchnorm._NormBase):
            self.guard = _Guard(self.module)


class _Guard:
    """Keeps explanations from writing the statistics of a normalisation in training mode: it
    refuses to run in them, and undoes at the end what one that runs already has written."""

    def __init__(self, module: nn.Module) -> None:
        """Copy the statistics, and register the check."""
        self._statistics = _WrittenState([module], normalisations=True)
        self._is_trained = False
        """Whether another thread has run the module since."""
        register = partial(module.register_forward_pre_hook, prepend=True)
        self._handle = Registered(self._check, register, None).handle

    def _check(self, module: nn.Module, args: Any) -> None:
        """Refuse to run in training mode in an explanation, and note that another thread runs the
        module: a forward-pre hook."""
        if _current.block is None:
            self._is_trained |= module.training
        elif module.training:
            raise ModelError(_DISTURBED)

    def end(self) -> None:
        """Put back the statistics, unless another thread has trained them meanwhile."""
        self._handle.remove()
        if not self._is_trained:
            self._statistics.__exit__()


_held_modes: dict[int, _HeldMode] = {}
_plain_train = nn.Module.train
"""The function that `_train` replaces while modules are held; it may be somebody else's."""


def _hold_modes(modules: Iterable[nn.Module]) -> list[_HeldMode]:
    """Put modules in evaluation mode, and count that one more block needs it; undone by
    `_release_modes`."""
    # The flags are set one by one rather than with `model.eval()`: a network that overrides `train`
    # to keep some part frozen would otherwise not come back as it was. Threads may share modules.
    global _plain_train
    held_modes = []
    with lock:
        if nn.Module.train is not _train:
            _plain_train = nn.Module.train
            nn.Module.train = _train  # type: ignore[method-assign, assignment]
        for module in modules:
            if not hasattr(module, "training"):  # a frozen program
                continue
            held = _held_modes.get(id(module))
            if held is None:
                held = _held_modes[id(module)] = _HeldMode(module, module.training)
                if held.training:
                    module.training = False
            held.blocks += 1
            held_modes.append(held)
    return held_modes


def _release_modes(held_modes: Iterable[_HeldMode]) -> bool:
    """Give modules back the modes that `_hold_modes` changed, unless other blocks hold them still.
    Returns whether another thread has called ``train()`` of one of them meanwhile."""
    disturbed = False
    ended: list[_HeldMode] = []
    with lock:
        for held in held_modes:
            disturbed |= held.disturbed
            held.blocks -= 1
            # a forked child has forgotten all held modes
            if held.blocks == 0 and _held_modes.pop(id(held.module), None) is held:
                ended.append(held)
        _give_back_modes(ended)
    return disturbed


def _give_back_modes(held_modes: Iterable[_HeldMode]) -> None:
    """Give back modules that no block holds any more; restore `nn.Module.train` if none is held at
    all. ``lock`` must be held, but for a process that has just been forked."""
    for held in held_modes:
        if held.module.training != held.training:
            held.module.training = held.training
        if held.guard is not None:
            held.guard.end()
    if not _held_modes and nn.Module.train is _train:
        nn.Module.train = _plain_train  # type: ignore[method-assign]


@wraps(_plain_train)
def _train(module: nn.Module, mode: bool = True) -> Any:
    """Replaces `nn.Module.train` while modules are held: notes the mode that another thread sets,
    to restore that one later."""
    with lock:
        held = _held_modes.get(id(module))
        # calls from within an explanation, by the network itself, are not to last
        is_from_outside = held is not None and _current.block is None
        # evaluation mode, which `train(False)` sets, is what explanations run in
        if held is not None and is_from_outside and mode is True:
            held.disturb()
        result = _plain_train(module, mode)
        if held is not None and is_from_outside:
            held.training = module.training
    return result


_MODULE = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of every module: hooks and modes change them, forward passes do not."""


_DATA = (torch.Tensor, np.ndarray, Number, str, dict, list, tuple, set, deque, type(None))
"""What a pass may leave in an attribute for the next one. Other objects, such as a session or a
compiled function, are made once and stay."""
_CONTAINERS = (dict, deque)
"""What a pass may change in place; a list that it adds to is more often a record of calls."""


class _WrittenState:
    """What forward passes may write into modules: buffers, other attributes, and what is in these,
    such as observers, running averages, counters and potentials of spiking neurons."""

    def __init__(self, modules: Iterable[nn.Module], *, normalisations: bool = False) -> None:
        """Copy the buffers of ``modules`` and the data in their attributes, and note what these
        are."""
        self._values: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        """Modules with their buffers and their other attributes."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Tensors in any of them, each with a copy and its version."""
        self._contents: list[tuple[Any, Any]] = []
        """Containers in attributes, each with a copy of it."""
        for module in modules:
            buffers = module._buffers
            is_of_torch = type(module).__module__.startswith("torch.")
            is_normalisation = isinstance(module, nn.modules.batchnorm._NormBase)
            # modules of torch without buffers, and normalisations in evaluation mode, write nothing
            if (is_of_torch and not buffers) or (is_normalisation and not normalisations):
                continue
            attributes = {**vars(module)}
            self._values.append((module, dict(buffers.items()), attributes))
            data = [value for name, value in attributes.items() if name not in _MODULE]
            for value in (*buffers.values(), *data):
                if type(value) in _CONTAINERS:
                    self._contents.append((value, copy.copy(value)))
                    self._copy(value.values() if isinstance(value, dict) else value)
                else:
                    self._copy((value,))

    def _copy(self, values: Iterable[Any]) -> None:
        """Copy the tensors among some values, but for parameters, which no pass writes to."""
        for value in values:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._copies.append((value, value.detach().clone(), _version(value)))

    def __exit__(self, *error: object) -> None:
        """Restore the buffers, the other attributes and their contents that modules had before a
        forward pass."""
        for module, buffers, attributes in self._values:
            _put_back(module._buffers, buffers)
            _put_back(vars(module), attributes)
        for container, content in self._contents:
            if _identities(container) != _identities(content):
                container.clear()
                put_in = container.update if isinstance(container, dict) else container.extend
                put_in(content)
        for tensor, values_before, version_before in self._copies:
            if not _is_same(tensor, values_before, version_before):
                with torch.no_grad():
                    if tensor.grad_fn is not None:  # what the pass has written has a history
                        tensor.detach_()
                    tensor.resize_(values_before.shape).copy_(values_before)


def _identities(container: Any) -> list[list[int]]:
    """Which objects a container holds, in order: its keys and values, or its items."""
    parts = [container, container.values()] if isinstance(container, dict) else [container]
    return [list(map(id, part)) for part in parts]


def _put_back(current: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore a module's dictionary ``current`` (of attributes or buffers) to what it was, the
    order included. Hooks and modes are left alone."""
    deleted = saved.keys() - current.keys() - _MODULE
    added = current.keys() - saved.keys() - _MODULE
    for name in added:
        value = current[name]
        # a switch that is new says that something, such as hooks, was made once, which stays
        if isinstance(value, _DATA) and not isinstance(value, bool):
            del current[name]
    for name in saved.keys() - _MODULE:
        if name in deleted or (
            current[name] is not saved[name] and isinstance(current[name], _DATA)
        ):
            current[name] = saved[name]
    if deleted:  # they now come last: take out and put in all, in their order
        for name in saved:
            current[name] = current.pop(name)


def _version(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, which grows with each in-place write; -1 for tensors of
    inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version


_MOST_FINDINGS = 64  # that are kept of a model
# what was found out about each model, after the identities and versions of its weights
_findings: weakref.WeakKeyDictionary[nn.Module, tuple[list[int], dict[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)


def findings_of(model: nn.Module) -> dict[Any, Any]:
    """What was found out about a model with the weights that it has now; it is forgotten when these
    change."""
    weights = parameters_of(model)
    # as `_version`, without a call for each weight; another weight has another identity
    versions = [-1 if weight.is_inference() else weight._version for weight in weights]
    weights_now = [*map(id, weights), *versions]
    found_with, findings = _findings.get(model, (None, {}))
    if found_with != weights_now or len(findings) > _MOST_FINDINGS:
        findings = {}
        _findings[model] = weights_now, findings
    return findings


def _is_same(tensor: torch.Tensor, values_before: torch.Tensor, version_before: int) -> bool:
    """Whether a buffer still has the values of its copy from before the pass; by its version where
    values cannot be compared."""
    try:
        return torch.equal(tensor, values_before)
    except RuntimeError:  # not every kind of tensor can be compared
        return _version(tensor) == version_before


class _TorchState(SignalSafe[None]):
    """Torch's settings in this thread, restored after the block. Within it, gradients are on or
    off, there is no inference mode, and on ``device`` no mixed precision."""

    _inference: Any = None
    _full_precision: Any = None

    def __init__(self, gradients: bool, device: str | None = None) -> None:
        """Prepare a block in which gradients are on or off, with full precision on ``device``."""
        self._gradients_within = gradients
        self._device = device

    def on_enter(self) -> None:
        """Save this thread's settings of torch, and switch to those of the block."""
        self._gradients = torch.is_grad_enabled()
        self._function_modes = torch._C._len_torch_function_stack()
        self._autocast: list[tuple[str, bool, torch.dtype]] = []
        for device in DEVICES:
            enabled = torch.is_autocast_enabled(device)
            self._autocast.append((device, enabled, torch.get_autocast_dtype(device)))
        self._caching = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        self._inference = torch.inference_mode(False)
        self._inference.__enter__()
        torch._C._set_grad_enabled(self._gradients_within)
        if self._device is not None and torch.is_autocast_enabled(self._device):
            self._full_precision = torch.autocast(self._device, enabled=False)
            self._full_precision.__enter__()

    def on_exit(self, error: BaseException | None) -> None:
        """Restore what was switched, and after an error also what contexts that were never left
        have changed."""
        if self._full_precision is not None:
            self._full_precision.__exit__(None, None, None)
        if self._inference is None:  # interrupted before anything was switched
            return
        self._inference.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._gradients)
        if error is None:
            return
        # what contexts have changed that the error left open
        while torch._C._len_torch_function_stack() > self._function_modes:
            torch._C._pop_torch_function_stack()
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._caching)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
            # as the end of the outermost context does
            if not self._nesting:
                torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    """How many contexts of mixed precision (autocast) this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class _RandomState:
    """The state of the random generator of a device, and what restores it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = _random_state(device)

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state, self._device)
        else:
            torch.set_rng_state(self._state)

    def has_moved(self) -> bool:
        """Whether numbers have been drawn since; both states lie in the memory of the CPU."""
        now = _random_state(self._device)
        states = [ctypes.string_at(state.data_ptr(), state.nbytes) for state in (self._state, now)]
        return states[0] != states[1]


def _random_state(device: torch.device) -> torch.Tensor:
    """The state of the random generator of a GPU of Nvidia's, or else of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _without_fast_path() -> ExitStack:
    """Turn the fast path of attention off; closing the stack restores it."""
    fast_path = torch.backends.mha
    stack = ExitStack()
    stack.callback(fast_path.set_fastpath_enabled, fast_path.get_fastpath_enabled())
    fast_path.set_fastpath_enabled(False)
    return stack


def without_fast_path() -> Shared:
    """A block in which attention and the layers of transformers do not take their fast path."""
    return Shared({_FAST_PATH: _without_fast_path})


def plain_sequences(model: nn.Module) -> Shared:
    """Let hooks see padded sequences of `nn.TransformerEncoder` as plain tensors, inside the block.
    Its fast path makes a nested tensor of them, which has no shape that a hook could read."""
    encoders = [module for module in modules_of(model) if isinstance(module, nn.TransformerEncoder)]
    return without_fast_path() if encoders else Shared({})


@contextmanager
def left_as_found(module: nn.Module) -> Iterator[None]:
    """Call a module only to look at it: hooks of groups do not run, and what it writes and draws at
    random is put back."""
    devices = {parameter.device for parameter in parameters_of(module) if parameter.is_cuda}
    # they copy when they are made; only `__exit__`, which restores, is needed
    states: list[_WrittenState | _RandomState] = list(map(_RandomState, (_CPU, *devices)))
    parts = modules_of(module)
    # normalisations write their statistics in training mode, which one may be in alone; a frozen
    # program has no mode
    is_training = any(getattr(part, "training", False) for part in parts)
    states.append(_WrittenState(parts, normalisations=is_training))
    were_off = acting.are_off
    try:
        acting.are_off = True
        yield
    finally:
        acting.are_off = were_off
        for state in states:
            state.__exit__()


class _LeftAsFound(SignalSafe[None]):
    """See `untouched`."""

    def __init__(self, model: nn.Module, gradients: bool, create_graph: bool, alone: bool) -> None:
        """Prepare a block of `untouched`; nothing is changed before it is entered."""
        self._model = model
        self.create_graph = create_graph
        self.alone = alone
        """Whether another one may not begin inside it."""
        self._has_ended = False
        self._modes: list[_HeldMode] = []
        self._shared: Shared | None = None
        self._default_device: Any = CALLERS_DEVICE.get()
        """The caller's, which the model runs with; None for the CPU."""
        self._torch = _TorchState(gradients or create_graph)

    def on_enter(self) -> None:
        """Enter `untouched`: save the settings of torch and of the process, and put the modules in
        evaluation mode. The order is that of `on_exit`, reversed."""
        global _used_threads
        self._outer = _current.block
        if self._outer is not None and self._outer.alone:
            if self.alone:
                raise ExplainError(
                    "an explanation was started from inside another one (hook or target); run them "
                    "in turn"
                )
            self.alone = True  # nor may one begin inside this block
        _used_threads = _used_threads or torch.get_num_threads() > 1  # `_begin_child` asks for it
        modules = modules_of(self._model)
        # the names of the modules do not change within the block: they are looked up once
        self._walked = module_names.walked
        module_names.walked = {**self._walked, self._model: modules}
        self._torch.on_enter()
        self._shared = Shared(self._settings_of_process(modules))
        _current.block = self
        self._shared.on_enter()
        self._modes = _hold_modes(modules)
        if self._default_device is not None:
            self._default_device.__enter__()

    def _settings_of_process(self, modules: Iterable[nn.Module]) -> dict[Any, Callable[[], Any]]:
        """What the threads of a process share, with functions that save and later restore it:
        random generators, state that the model writes, compilation."""
        # The generators belong to the process: numbers that another thread draws meanwhile are
        # drawn again afterwards. Compiled code has no layers to hook and no operations to record,
        # so it runs as the Python code that it was made from; of other threads too, with the same
        # results.
        settings: dict[Any, Callable[[], Any]] = {_CPU: partial(_RandomState, _CPU)}
        # Where nothing has been compiled yet, loading the compiler would take seconds. There is no
        # function around `set_stance`: torch.compile would look into it.
        if "torch._dynamo" in sys.modules:
            settings[_EAGER] = partial(torch.compiler.set_stance, "force_eager")
        for module in modules:
            if isinstance(module, nn.TransformerEncoder):  # see `plain_sequences`
                settings[_FAST_PATH] = _without_fast_path
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_cuda:
                    settings[parameter.device] = partial(_RandomState, parameter.device)
        if not is_transforming():  # a proxy shows no values to compare
            settings["state", id(self._model)] = partial(_WrittenState, modules)
        return settings

    def on_exit(self, error: BaseException | None) -> None:
        """Leave `untouched`: restore all, and turn known errors of torch into a `ModelError` with a
        remedy."""
        if self._shared is None:  # `on_enter` has refused to begin
            return
        module_names.walked = self._walked
        # after an error, `_TorchState` removes it with other function modes
        if self._default_device is not None and error is None:
            self._default_device.__exit__(None, None, None)
        disturbed = _release_modes(self._modes)
        self._shared.on_exit(error)
        self._torch.on_exit(error)
        self._has_ended = True
        # an outer block may have ended earlier; in a forked child, no block is under way
        while _current.block is not None and _current.block._has_ended:
            _current.block = _current.block._outer
        if isinstance(error, (RuntimeError, HookError)):
            remedy = next((_REMEDIES[part] for part in _REMEDIES if part in str(error)), None)
            if remedy is not None:
                raise ModelError(remedy) from None
        if error is None and disturbed:
            raise ModelError(_DISTURBED)


def untouched(
    model: nn.Module, *, grad: bool = False, create_graph: bool = False, alone: bool = False
) -> AbstractContextManager[None]:
    """Run a model in evaluation mode, gradients as given, outside inference mode; then restore all
    that a pass writes. Each submodule gets its own mode back, also with several threads."""
    # With create_graph, gradients are on, and what is noted of the pass stays in the graph: see
    # `detached`. With alone, there is one such block at a time in a thread: an explanation that
    # begins inside another's hook would see the other's hooks. Parameters, .grad and requires_grad
    # are never written.
    return _LeftAsFound(model, grad, create_graph, alone)


def start_over(*, written: bool = True) -> None:
    """Let the next pass in this block of `untouched` begin as the first one: with the same random
    numbers, and unless ``written`` is false, without what passes have written since."""
    block = _current.block
    # with `written` false, state stays: a graph that is still needed may hold it
    restored_kinds = (_RandomState, _WrittenState) if written else _RandomState
    if block is not None and block._shared is not None:
        for context in block._shared.held_alone():  # none if another thread runs the model
            if isinstance(context, restored_kinds):
                context.__exit__(None, None, None)


def has_drawn() -> bool:
    """Whether random numbers were drawn since this block of `untouched` began; false if another
    thread may have drawn them."""
    block = _current.block
    if block is None or block._shared is None:
        return False
    held = block._shared.held_alone()
    return any(context.has_moved() for context in held if isinstance(context, _RandomState))


@signal_safe
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Let normalisations run on copies of their running statistics inside the block. Training
    overwrites them in place, and a graph that is kept would silently use the new values."""
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in modules_of(model):
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                continue
            for name in ("running_mean", "running_var"):
                statistic = module._buffers[name]
                if statistic is not None:
                    originals.append((module._buffers, name, statistic))
                    module._buffers[name] = statistic.clone()
        yield
    finally:
        # modules may share a dictionary: what was there first is put back last
        for buffers, name, statistic in reversed(originals):
            buffers[name] = statistic


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a forward pass, without its graph unless the caller asked to keep graphs
    (``create_graph``): then maps can be differentiated."""
    block = _current.block
    return tensor if block is not None and block.create_graph else tensor.detach()


def calculating(device: str, *, create_graph: bool = False) -> AbstractContextManager[None]:
    """Compute without a graph (or with, for ``create_graph``), in full precision on ``device``,
    outside inference mode, whatever the caller's settings are."""
    return _TorchState(create_graph, device)


@signal_safe
def recording(gradients: bool) -> Iterator[None]:
    """Switch gradients on or off, and back afterwards. Unlike ``torch.set_grad_enabled``, an
    interrupt while it ends leaves nothing switched."""
    previous = torch.is_grad_enabled()
    torch.set_grad_enabled(gradients)
    try:
        yield
    finally:
        torch.set_grad_enabled(previous)


def is_in_untouched_block() -> bool:
    """Whether this thread is inside an `untouched` block."""
    return _current.block is not None


def is_transforming() -> bool:
    """Whether this runs inside a transform of `torch.func` (`vmap`, `grad`, `jvp`), where tensors
    are proxies."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_proxy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a proxy that a transform of `torch.func` shows; any other tensor as it
    is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def copied(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy a model, for a thread that explains it while another one trains it or switches its
    modes.

    The copy has modes, hooks and weights of its own. Hooks that the user has registered on the
    model go with it, since they may be part of what it computes; those of `HookGroup` do not. It is
    the model as it is now: copy it between two steps of training, and again when the weights have
    changed. Name its layers, since modules of the original are not part of it.

    Args:
        model: any module that ``copy.deepcopy`` can copy.
        share: share parameters and buffers with the model, which costs no memory and follows every
            change of them. This is for threads that switch modes, not for those that train: where
            weights change between an explanation's forward and backward pass, PyTorch raises a
            RuntimeError.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> other = copied(model).eval()
    >>> model.training, other[0].weight is model[0].weight
    (True, False)
    >>> copied(model, share=True)[0].weight is model[0].weight
    True
    """
    while True:
        try:
            # tensors made in inference mode could never have gradients
            with torch.inference_mode(False):
                return _copied(model, share)
        except RuntimeError as error:
            if "during iteration" not in str(error):  # another thread was just registering hooks
                raise


def _copied(model: nn.Module, share: bool) -> nn.Module:
    """Copy a model once, with ``share`` its parameters and buffers themselves. Modules that are
    held in evaluation mode get their own modes in the copy."""
    memo: dict[int, Any] = {}
    modules = modules_of(model)
    for module in modules:  # parameters, buffers, and what hooks compute from them
        for tensor in (
            *module._parameters.values(),
            *module._buffers.values(),
            *vars(module).values(),
        ):
            # deepcopy takes what the memo has for the copy; it refuses tensors with a history
            if isinstance(tensor, torch.Tensor) and (share or not tensor.is_leaf):
                memo[id(tensor)] = tensor if share else tensor.detach().clone()
    copied_model = copy.deepcopy(model, memo)
    with lock:
        # copies get the modes that their originals have outside of explanations
        for module in modules:
            twin = memo.get(id(module))
            held = _held_modes.get(id(module))
            # a module may say that its copy is itself
            if isinstance(twin, nn.Module) and twin is not module and held is not None:
                twin.training = held.training
    return copied_model


def _begin_child() -> None:
    """Forget all blocks of `untouched` that are under way, in a process that has just been
    forked."""
    # an explanation that was running at the fork continues only in the parent
    _current.block = None
    modes = list(_held_modes.values())
    _held_modes.clear()
    _give_back_modes(modes)
    # threads of OpenMP do not survive a fork, and code that counts on them waits forever
    if _used_threads:
        torch.set_num_threads(1)


at_fork(after_in_child=_begin_child)
