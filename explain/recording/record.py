"""`record`: run a model once, and note what it computes."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from explain._utils import nested
from explain.recording.functions import with_functions
from explain.recording.modes import Watcher
from explain.recording.recorder import PassRecorder
from explain.recording.recording import Recording
from explain.recording.torch_internals import scripts_as_written


def record(model: nn.Module, *args: Any, **kwargs: Any) -> Recording:
    """Run a model once on inputs, and return the operations that it computed.

    All tensors in ``args`` and ``kwargs`` are inputs, in their order; the model runs on copies of
    them. It runs in the mode that it is in, with or without gradients as the caller, and is not put
    back: what it writes into its buffers stays.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(inplace=True))
    >>> recording = record(model, torch.rand(1, 1, 4, 4))
    >>> print(*recording.steps, sep="\\n")
    %3 = convolution(%0, 0.weight, 0.bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    %4 = relu(%3)
    >>> other = torch.rand(1, 1, 4, 4)
    >>> torch.equal(recording.replay(other), model(other))
    True
    """
    recorder = PassRecorder(model)
    copied_args, copied_kwargs = nested.replace(
        (args, kwargs), lambda _, tensor: input_copy(tensor)
    )
    for _, tensor in nested.paths((copied_args, copied_kwargs)):
        recorder.add_input(tensor)
    with ExitStack() as stack:
        record_until(stack, recorder)
        output = model(*copied_args, **copied_kwargs)
    return finished(recorder, output)


def record_until(stack: ExitStack, recorder: PassRecorder) -> None:
    """Let a recorder note what runs until ``stack`` closes. Attention, and an LSTM on a CPU, are
    computed by their definitions meanwhile."""
    # An attention's derivative is then that of what is recorded, and an LSTM has the same steps in
    # each precision.
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    if recorder.has_lstm:
        # torch.backends.mkldnn.flags reads settings that warn
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
    stack.enter_context(scripts_as_written(recorder.scripts.values()))
    stack.enter_context(Watcher(recorder.watched))
    stack.enter_context(recorder)


def finished(recorder: PassRecorder, output: Any) -> Recording:
    """The recording of a pass that has returned ``output``."""
    outputs = {path: recorder.value_of(tensor) for path, tensor in nested.paths(output)}
    steps = recorder.steps
    if recorder.functions:
        steps = with_functions(recorder.functions, steps, outputs.values(), recorder.with_gradient)
    recorder.name_derivatives()
    used = set(outputs.values()).union(*(step.inputs for step in steps))
    # autograd detaches what it saves, which is no step of the network
    steps = [step for step in steps if step.name != "detach" or not used.isdisjoint(step.results)]
    recording = Recording(
        inputs=tuple(recorder.inputs),
        steps=tuple(steps),
        outputs=outputs,
        output=nested.replace(output, lambda _, tensor: tensor.detach()),
        unseen=tuple(recorder.unseen),
        scripted=frozenset(recorder.scripts),
    )
    recorder.close()
    return recording


def input_copy(tensor: Tensor) -> Tensor:
    """A copy of an input that a gradient can be asked for, and that may be written into."""
    source = tensor.detach().clone()
    if not (source.is_floating_point() or source.is_complex()):
        return source
    # autograd lets nobody write into a leaf, but into what is computed from one
    return source.requires_grad_().clone()
