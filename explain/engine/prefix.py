"""What lies before a layer: its operators are answered with what they gave before, for passes that
alter only what the layer returns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from explain._utils.nested import first_tensor
from explain.engine.settings import MEMORY
from explain.hooks import HookGroup, handles, layer_names
from explain.recording.aliases import memory_of
from explain.recording.modes import OperatorCalls, Watcher
from explain.recording.recorder import written_tensors
from explain.recording.torch_internals import facts_of, writes_of
from explain.recording.values import mapped, tensors_of


class PrefixError(RuntimeError):
    """The network does something else before the layer than it did in an earlier pass."""


class ReachedError(BaseException):
    """Ends a forward pass at the layer; no ``except Exception`` of the model catches it."""


class LayerPrefix:
    """The results of the operators before a call of a layer, on one input: noted in a first pass,
    answered in later ones. Each runs in ``with prefix.passing()``, and calls `reach`."""

    def __init__(self) -> None:
        self.is_exact = True
        """Whether further passes can be answered: nothing was written to what was there before the
        pass, nor behind the layer to what was made before it, as far as is known."""
        self.results: list[tuple[Any, Any]] = []
        """Each operator, and what it gave."""
        self.is_known = False
        """Whether a pass has come to the layer."""
        self._is_behind = False  # whether the pass that runs has come to it
        self._made = set[int]()
        """The memory of tensors that the operators have made."""
        self._bytes = 0  # of these tensors

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Note the operators of a pass before the layer, or answer them, if this is not the
        first."""
        self._is_behind = False
        self._answers = iter(self.results)
        with Watcher(self._watched), OperatorCalls(self._answer):
            yield

    def reach(self) -> None:
        """Let operators run from now on: the pass has come to the layer."""
        self.is_known = True
        self._is_behind = True

    def _watched(self, name: str, tensor: Tensor) -> None:
        """Memory may be written to unseen, or values may lead to other operators."""
        if not handles.acting.depth:
            self.forget()

    def forget(self) -> None:
        """Answer no further pass."""
        self.is_exact = False
        self.results.clear()

    def _answer(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the network and note its result, or answer it with an earlier one.
        Hooks run their own operators in each pass."""
        facts = facts_of(operator)
        is_of_hook = bool(handles.acting.depth)
        # a view costs nothing: it is made again, of what was answered
        if is_of_hook or facts.is_view or not self.is_exact:
            return operator(*args, **kwargs)
        is_answered = self.is_known and not self._is_behind
        if is_answered:
            noted, result = next(self._answers, (None, None))
            if noted is not operator:
                raise PrefixError(f"another operator is called than before: {operator}")
            return mapped(result, _without_graph)
        written = written_tensors(writes_of(facts, args), args, kwargs)
        is_made_before = [memory_of(tensor) in self._made for tensor in written]
        result = operator(*args, **kwargs)
        if self._is_behind:
            if any(is_made_before):  # what was noted is overwritten
                self.forget()
            return result
        new_tensors = [] if written else list(tensors_of(result))
        self._made.update(map(memory_of, new_tensors))
        self._bytes += sum(tensor.nbytes for tensor in new_tensors)
        self.results.append((operator, result))
        # an answer cannot write into what was there before the pass, nor move a tensor in place
        if facts.moves_itself or not all(is_made_before) or self._bytes > MEMORY:
            self.forget()
        return result


def _without_graph(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value


def at_call(group: HookGroup, layer: str, call: int, act: Callable[[Any, bool], Any]) -> None:
    """Hook one call of a layer so that ``act(output, overwrote)`` replaces what it returned, if not
    None; ``overwrote`` says whether the output is the input, changed in place."""
    assert group._model is not None
    name = layer_names.name_of_call(layer, call, group._model)
    inputs: list[tuple[Tensor, int]] = []

    def note_versions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook: note how often the layer's first input tensor has been overwritten before the
        call."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # inference tensors have no version
        inputs[:] = [
            (tensor, tensor._version) for tensor in tensors[:1] if not tensor.is_inference()
        ]

    def returned(module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: tell by the input's version whether the layer overwrote it, and hand its
        output to ``act``."""
        tensor = first_tensor(output)
        overwrote = any(
            tensor_before is tensor and tensor._version != version
            for tensor_before, version in inputs
        )
        inputs.clear()
        return act(output, overwrote)

    # a part of an attention cannot have overwritten the input
    if not layer_names.place_of(layer, group._model).part:
        group.forward_pre(name, note_versions, with_kwargs=True)
    group.forward(name, returned)


def prefix_of(
    group: HookGroup, model: nn.Module, layer: str, call: int, *, ends: bool = False
) -> LayerPrefix:
    """What lies before a call of a layer, as far as the pass that runs while the group is alive
    notes it; ``ends`` ends the pass at the layer, by `ReachedError`.
    """
    prefix = LayerPrefix()

    def reach(output: Any, overwrites: bool) -> None:
        """At the layer: nothing can be answered if it overwrites its input."""
        prefix.reach()
        if overwrites:
            prefix.forget()
        if ends:
            raise ReachedError

    at_call(group, layer, call, reach)
    return prefix
