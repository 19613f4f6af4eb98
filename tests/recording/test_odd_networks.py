"""Recordings of networks in wrappers, of other types, with checkpoints and parametrisations; what
a recording cannot see is named or refused."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from explain._utils.errors import HookError
from explain.recording import record
from tests.recording.test_recording import assert_replays, images


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3)))


def small(dtype=torch.float64):
    torch.manual_seed(0)
    return Small().to(dtype).eval()


class Applied(nn.Module):
    """A network that is a function of another."""

    def __init__(self, function, inner=None):
        super().__init__()
        self.function = function
        self.inner = inner

    def forward(self, x):
        return self.function(x) if self.inner is None else self.function(self.inner, x)


OPERATIONS = ["convolution", "native_batch_norm", "relu", "mean", "t", "addmm"]


def last_operations(recording):
    return [step.name for step in recording.steps[-len(OPERATIONS) :]]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.usefixtures("one_process")
def test_in_distributed_data_parallel(training):
    model = nn.parallel.DistributedDataParallel(small().train(training))
    recording = assert_replays(model, images(), images(1))
    assert {"module.conv", "module.norm", "module.head"} <= {s.module for s in recording.steps}
    assert not any("c10d" in step.name for step in recording.steps)
    assert not recording.unseen


@pytest.mark.usefixtures("one_process")
def test_what_other_processes_give_is_named():
    def reduced(x):
        h = x * 2
        dist.all_reduce(h)
        return h

    with torch.no_grad():
        assert "allreduce" in str(record(Applied(reduced), images()).unseen)


@pytest.mark.parametrize("kind", ["whole", "part", "in place"])
def test_of_a_compiled_network_its_original_module_is_recorded(kind):
    model = small()
    if kind == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    model = nn.Sequential(model) if kind == "part" else model
    assert last_operations(assert_replays(model, images(), images(1))) == OPERATIONS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision(dtype):
    recording = assert_replays(small(dtype), images(dtype=dtype), images(1, dtype=dtype))
    assert {value.dtype for value in recording.outputs.values()} == {dtype}


def test_autocast():
    def cast(inner, x):
        with torch.autocast("cpu", torch.bfloat16):
            return inner(x)

    model = Applied(cast, small(torch.float32))
    x, other = images(dtype=torch.float32), images(1, dtype=torch.float32)
    assert "_to_copy" in [step.name for step in assert_replays(model, x, other).steps]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:must run observer before calling")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_weights_of_eight_bits(kind):
    quantization = torch.ao.quantization
    x, other = images(dtype=torch.float32), images(1, dtype=torch.float32)
    if kind == "dynamic":
        model = quantization.quantize_dynamic(small(torch.float32), {nn.Linear})
    else:
        layers = nn.Conv2d(3, 4, 3), nn.ReLU()
        model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).eval()
        model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
        quantization.prepare(model, inplace=True)(x)
        quantization.convert(model, inplace=True)
    recording = assert_replays(model, x, other)
    assert any(step.name.startswith("quantized::") for step in recording.steps)


def gradients(run, model, x):
    """The gradients of a function of the output in the input and in all parameters, by name."""
    source = x.detach().clone().requires_grad_()
    tensors = {"": source, **dict(model.named_parameters())}
    model.zero_grad()
    run(source * 1).sin().sum().backward()  # reentrant checkpoints refuse `torch.autograd.grad`
    return {name: tensor.grad.clone() for name, tensor in tensors.items()}


def assert_same_gradients(model, x, other):
    recording = assert_replays(model, x.requires_grad_(), other.requires_grad_())
    assert not recording.unseen
    expected = gradients(model, model, other)
    for name, gradient in gradients(recording.replay, model, other).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    return recording


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_recorded_inside(reentrant):
    def saved(inner, x):
        return checkpoint(inner, x * 2, use_reentrant=reentrant)

    recording = assert_same_gradients(Applied(saved, small()), images(), images(1))
    assert last_operations(recording) == OPERATIONS


class Parametrised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
        self.normed = parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
        self.head = parametrizations.orthogonal(nn.Linear(4, 4))

    def forward(self, x):
        return self.head(self.normed(self.conv(x)).tanh().mean((2, 3)))


def test_parametrisations_are_part_of_the_recording():
    torch.manual_seed(0)
    recording = assert_same_gradients(Parametrised().double().eval(), images(), images(1))
    parametrised = {step.module for step in recording.steps if "parametrizations" in step.module}
    layers = "conv", "normed", "head"
    assert parametrised == {f"{layer}.parametrizations.weight.0" for layer in layers}


def test_other_weights_than_the_modules_own():
    def doubled(inner, x):
        weights = {name: weight * 2 for name, weight in inner.named_parameters()}
        return torch.func.functional_call(inner, weights, (x,))

    assert_same_gradients(Applied(doubled, small()), images(), images(1))


def test_a_module_mapped_over_a_batch():
    torch.manual_seed(0)
    layer = nn.Linear(8, 5).double()
    model = Applied(lambda inner, x: torch.vmap(inner, in_dims=1, out_dims=1)(x), layer)
    assert_same_gradients(model, images(), images(1))


class Reversed(torch.autograd.Function):
    """Nothing on the way forward; the way back is negative."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Ones(torch.autograd.Function):
    """A constant on the way forward, and nothing on the way back."""

    @staticmethod
    def forward(ctx, x):
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Kept(torch.autograd.Function):
    """Doubles into a tensor that is kept for the next pass."""

    @staticmethod
    def forward(ctx, x, kept):
        result = kept.setdefault("it", torch.zeros_like(x)).copy_(2 * x)
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


def test_a_function_that_writes_into_its_arguments_is_run_on_copies():
    kept = {}
    model = Applied(lambda inner, x: Kept.apply(x.sin(), kept) + 1, nn.Identity())
    x = torch.rand(2, 3, dtype=torch.float64)
    for _ in range(2):  # the second pass takes memory that it has written
        recording = record(model, x)
        assert not recording.unseen
        (output,) = recording.outputs.values()
        before = [value.tensor.clone() for step in recording.steps for value in step.inputs]
        written = kept["it"].clone()
        torch.testing.assert_close(recording.replay(3 * x), 2 * (3 * x).sin() + 1)
        torch.testing.assert_close(output.tensor, 2 * x.sin() + 1)
        after = [value.tensor for step in recording.steps for value in step.inputs]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert torch.equal(kept["it"], written)


def with_threads(x):
    halves = {}

    def double(index):
        halves[index] = x[index] * 2

    threads = [threading.Thread(target=double, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.stack([halves[0], halves[1]]).sin()


def clamped_past_autograd(x):
    h = x * 2
    with torch.no_grad():
        h.clamp_(max=1)
    return h


UNSEEN = {
    "thread": with_threads,
    "Reversed": lambda x: Reversed.apply(x * 2) + x,
    "Ones": lambda x: Ones.apply(x) * x,
    "write": clamped_past_autograd,
    "tolist": lambda x: x * x.tolist()[0][0][0][0],
}


@pytest.mark.parametrize("word", UNSEEN)
def test_what_a_recording_cannot_see_is_named(word):
    unseen = record(Applied(UNSEEN[word]), images()).unseen
    assert word in str(unseen)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_operators_of_the_interpreter_of_scripts_are_named():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    script = torch.jit.optimize_for_inference(torch.jit.script(layers.eval()))
    x, other = images(dtype=torch.float32), images(1, dtype=torch.float32)
    recording = record(script, x)
    is_right = torch.allclose(recording.replay(other), script(other), atol=1e-6)
    assert is_right or "mkldnn" in str(recording.unseen)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_refused(layout):
    def nested(x):
        return torch.nested.as_nested_tensor([x[0, 0], x[1, 1, :3]], layout=layout) * 2

    with pytest.raises(HookError, match="nested"):
        record(Applied(nested), images())


def test_two_threads_record_at_once():
    model = small()
    both = threading.Barrier(2, timeout=60)
    recordings = {}

    def wait(inner, x):
        both.wait()
        h = inner(x)
        both.wait()
        return h * 2

    shared = Applied(wait, model)

    def run(seed):
        recordings[seed] = record(shared, images(seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        recording = recordings[seed]
        assert [step.name for step in recording.steps] == [*OPERATIONS, "mul"]
        assert {step.call for step in recording.steps} == {0}
        replayed = recording.replay(images(2))
        torch.testing.assert_close(replayed, model(images(2)) * 2, rtol=0, atol=0)
