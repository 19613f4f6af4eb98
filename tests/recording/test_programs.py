"""Recordings of random networks: in place, through views, with modules called twice."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from explain._utils import nested
from explain.recording import record
from tests.fuzz.programs import Network, Program
from tests.fuzz.sketch import programs
from tests.fuzz.test_networks import ALWAYS


def images_of(program: Program, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(2, *shape, generator=generator, dtype=torch.float64) for shape in program.inputs
    ]


def check(program: Program) -> None:
    network = Network(program).eval()
    first, other = (images_of(program, seed) for seed in (0, 1))
    recording = record(network, *first)
    for inputs in (first, other):
        expected = nested.paths(network(*[tensor.clone() for tensor in inputs]))
        replayed = dict(nested.paths(recording.replay(*inputs)))
        assert replayed.keys() == dict(expected).keys()
        for path, tensor in expected:
            torch.testing.assert_close(replayed[path], tensor, rtol=1e-12, atol=1e-12)
    parameters = [p for p in network.parameters() if p.requires_grad]
    sources = [tensor.requires_grad_() for tensor in other]
    try:
        expected = gradients(network, sources, parameters)
    except RuntimeError as error:  # the network overwrites what its own backward pass needs
        if "inplace operation" in str(error) or "does not require grad" in str(error):
            return
        raise
    for one, other in zip(gradients(recording.replay, sources, parameters), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def gradients(run, sources, parameters):
    output = nested.paths(run(*[source * 1 for source in sources]))
    total = sum(tensor.sin().sum() for _, tensor in output)
    return torch.autograd.grad(total, [*sources, *parameters], allow_unused=True)


@hypothesis.settings(ALWAYS, max_examples=40)
@hypothesis.given(programs(9))
def test_random_networks_are_replayed(program: Program) -> None:
    check(program)


@pytest.mark.long
@hypothesis.settings(ALWAYS, max_examples=400)
@hypothesis.given(programs(14))
def test_many_random_networks_are_replayed(program: Program) -> None:
    check(program)
