"""The parts of an attention while it is computed: queries, keys, values, weights, and what each
head gives.

Which operators of a module compute them is found by recording a call of it (`explain.recording`),
however the attention is written. In later calls with the same kinds of arguments, these operators
are met by their numbers, before autograd is: what takes the place of a part is differentiated.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from explain._utils import nested
from explain._utils.errors import HookError
from explain._utils.modules import modules_of
from explain._utils.signals import deferring_signals
from explain.hooks.handles import acting, called_as_hook
from explain.hooks.preserve import (
    findings_of,
    is_transforming,
    left_as_found,
    without_fast_path,
)
from explain.recording import Step
from explain.recording.attention import attentions_in, heads_together
from explain.recording.attention_parts import HeadLayout, place_of_part
from explain.recording.functions import with_functions
from explain.recording.modes import OperatorCalls
from explain.recording.record import record_until
from explain.recording.recorder import PassRecorder
from explain.recording.torch_internals import (
    dispatching_autograd,
    facts_of,
    scripts_as_written,
    without_dispatch_modes,
)

NO_ATTENTION = "no attention was recognised in it (a softmax over the keys between two products)"


@dataclass(frozen=True)
class _Plan:
    """The operators of a call of a module as far as they matter, and where among them a part is
    met: as which argument of an operator (None for its result), and how it is laid out."""

    operators: Sequence[Any]
    places: Mapping[int, tuple[int | None, HeadLayout]]


class AttentionHook:
    """Lets ``fn(module, args, part)`` see and replace a part of the attentions that a module
    computes. ``where`` is the layer's name in messages."""

    def __init__(self, where: str, part: str, fn: Callable[..., Tensor | None]) -> None:
        self._where = where
        self._part = part
        self._fn = fn
        """Gets ``(N, heads, tokens, d)`` or ``(N, heads, queries, keys)``; heads first, without N,
        where it is not known which are of one image."""
        self._running: list[_FollowedCall | None] = []

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Follow a call of the module that begins: a forward-pre hook with kwargs."""
        plan = self._plan(module, args, kwargs)
        call = None
        if plan.places:
            edit = partial(self._fn, module, args)
            # this hook itself counts as running
            call = _FollowedCall(plan, edit, self._where, depth=acting.depth - 1)
        self._running.append(call)  # None too: `end` takes one away for each call
        if call is not None:
            _following.begin(call)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Follow a call no longer, when it ends or raises: a forward hook that is always called."""
        if self._running:
            call = self._running.pop()
            if call is not None:
                _following.end(call)

    def close(self) -> None:
        """Follow no call any more; an interrupt may have left some."""
        while self._running:
            self.end(nn.Identity(), None, None)

    def _plan(self, module: nn.Module, args: Any, kwargs: Any) -> _Plan:
        """Where the part is met in a call with such arguments; found out once, as long as the
        weights stay."""
        if is_transforming():
            raise HookError(
                f"{self._where} must run outside torch.vmap and other transforms of torch.func; "
                "name a layer around them"
            )
        # the key of a plan: whatever may make the module run other operators
        tensors = nested.paths((args, kwargs))
        numbers: dict[int, int] = {}  # the same for a tensor that is given twice
        tensor_kinds = []
        for path, tensor in tensors:
            number = numbers.setdefault(id(tensor), len(numbers))
            layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
            tensor_kinds.append((path, number, tensor.requires_grad, layout))
        settings = (
            # of all modules inside, which a caller may switch alone; a frozen program has no mode
            *[getattr(part, "training", None) for part in modules_of(module)],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(tensors[0][1].device.type if tensors else "cpu"),
        )
        constants = []
        for value in nested.constants((args, kwargs)):
            is_plain = value is None or isinstance(value, (bool, int, float, str))
            constants.append(value if is_plain else type(value))
        key = ("attention", self._part, *tensor_kinds, *settings, *constants)
        findings = findings_of(module)
        if key not in findings:
            findings[key] = self._find(module, args, kwargs)
        plan: _Plan = findings[key]
        return plan

    def _find(self, module: nn.Module, args: Any, kwargs: Any) -> _Plan:
        """Record a call of the module on copies of its arguments, and look for the part in it."""
        requirement = f"{self._where} must compute its heads in one tensor"
        copies: dict[int, Tensor] = {}  # the module may write into its arguments
        memo: dict[int, Any] = {}  # so that tensors which share memory do so in the copies too

        def copied(path: nested.Path, tensor: Tensor) -> Tensor:
            """A copy of an argument that lies in memory as it does; of one that is there twice, the
            same."""
            if id(tensor) not in copies:
                copy_of_it = copy.deepcopy(tensor.detach(), memo)
                copies[id(tensor)] = copy_of_it.requires_grad_(tensor.requires_grad)
            return copies[id(tensor)]

        copied_args, copied_kwargs = nested.replace((args, kwargs), copied)
        recorder = PassRecorder(module)
        inputs = [recorder.add_input(tensor) for tensor in copies.values()]
        operators: list[Any] = []
        numbers: dict[Step, int] = {}  # the operator of the module that each step belongs to
        depth = acting.depth

        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Run an operator of the module, and note the steps that it is in the record."""
            steps_before = len(recorder.steps)
            result = operator(*args, **kwargs)
            if acting.depth == depth:  # not in a hook, which may run others in later calls
                numbers.update(dict.fromkeys(recorder.steps[steps_before:], len(operators)))
                operators.append(operator)
            return result

        with ExitStack() as stack:
            stack.enter_context(left_as_found(module))
            stack.enter_context(without_dispatch_modes())
            record_until(stack, recorder)
            _show_operators(stack, run)
            output = module.forward(*copied_args, **copied_kwargs)
        outputs = [recorder.value_of(tensor) for _, tensor in nested.paths(output)]
        steps = with_functions(recorder.functions, recorder.steps, outputs, recorder.with_gradient)
        attentions = attentions_in(steps)
        if any(len(heads) > 1 for heads in heads_together(attentions)):
            raise HookError(
                f"{requirement}, got them one by one; name an attention that has them at once"
            )
        places: dict[int, tuple[int | None, HeadLayout]] = {}
        for attention in attentions:
            place = place_of_part(self._part, attention, steps, inputs)
            number = None if place is None else numbers.get(place.step)
            # an operator that is recorded as another one has other arguments
            if place is None or number is None or operators[number] is not place.step.operator:
                raise HookError(f"{requirement}, got another layout; name the layer around it")
            places[number] = place.argument, place.layout
        recorder.close()
        recorder.release()
        # what runs behind the last place may differ from call to call
        return _Plan(operators[: max(places, default=-1) + 1], places)


@dataclass(eq=False)
class _FollowedCall:
    """A call of a module that is under way, and how many of its operators have run."""

    plan: _Plan
    edit: Callable[[Tensor], Tensor | None]
    where: str
    depth: int
    """How many hooks were running when it began: those inside it are not followed."""
    count: int = field(default=0, init=False)

    def next_place(self, operator: Any) -> tuple[int | None, HeadLayout] | None:
        """Count an operator that is about to run; where a part is met at it, if there is one."""
        number = self.count
        self.count += 1
        if number < len(self.plan.operators) and self.plan.operators[number] is not operator:
            raise HookError(
                f"{self.where} must compute its attention by the same operations in each call, got "
                f"{operator}; name a layer that does"
            )
        return self.plan.places.get(number)

    def replaced(self, tensor: Tensor, layout: HeadLayout) -> Tensor:
        """What takes the place of a part."""
        shown = layout.shown(tensor)
        new = called_as_hook(self.edit, shown)
        if new is None:
            return tensor
        if new.shape != shown.shape:
            raise HookError(
                f"hook on {self.where} must return a tensor of shape {tuple(shown.shape)}, got "
                f"{tuple(new.shape)}"
            )
        return layout.put_back(new, tensor.shape)


class _Following(threading.local):
    """The calls that this thread follows, each inside the one before it."""

    def __init__(self) -> None:
        self._calls: list[_FollowedCall] = []
        self._stack = ExitStack()

    @deferring_signals
    def begin(self, call: _FollowedCall) -> None:
        """Follow a call; attention is computed by its definition meanwhile."""
        self._calls.append(call)
        if len(self._calls) == 1:  # once for all that begin inside it
            self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._stack.enter_context(scripts_as_written())
            self._stack.enter_context(without_fast_path())
            _show_operators(self._stack, self._run)

    @deferring_signals
    def end(self, call: _FollowedCall) -> None:
        """Follow a call no longer, nor any inside it."""
        if call in self._calls:
            del self._calls[self._calls.index(call) :]
        if not self._calls:
            self._stack.close()

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, with parts of attentions replaced before or after it."""
        replacing_result: list[tuple[_FollowedCall, HeadLayout]] = []
        for call in self._calls:
            # operators that a hook runs meanwhile are not the module's
            place = call.next_place(operator) if call.depth == acting.depth else None
            if place is None:
                continue
            argument, layout = place
            if argument is None:
                replacing_result.append((call, layout))
            else:
                new = call.replaced(args[argument], layout)
                args = (*args[:argument], new, *args[argument + 1 :])
        result = operator(*args, **kwargs)
        for call, layout in replacing_result:
            new = call.replaced(result, layout)
            # what an in-place operator gives is a tensor that the module has already
            result = result.copy_(new) if facts_of(operator).writes else new
        return result


_following = _Following()


def _show_operators(stack: ExitStack, run: Callable[..., Any]) -> None:
    """Let ``run`` run the operators of this thread until ``stack`` closes, before autograd and
    without those that only call others and those that change the type."""

    def run_single(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or those that it calls."""
        if facts_of(operator).is_composite:
            with mode:  # it is off while an operator runs, and must see those that this one calls
                return operator.decompose(*args, **kwargs)
        with dispatching_autograd(True):
            if operator is torch.ops.aten._to_copy.default:  # mixed precision keeps its results
                return operator(*args, **kwargs)
            return run(operator, args, kwargs)

    mode = OperatorCalls(run_single)
    stack.enter_context(dispatching_autograd(False))
    stack.enter_context(mode)
