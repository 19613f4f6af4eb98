from __future__ import annotations

import pytest
import torch
from torch import nn

from explain.training import GradientFlow


def test_gradient_flow_judges_layers_by_their_mean_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model.empty = nn.Parameter(torch.empty(0))
    with GradientFlow(model) as flow:
        for _ in range(3):
            scores = model[2](model[1](model[0](torch.ones(2, 4)) * 1e-9))
            (scores.sum() + model.empty.sum()).backward()
    assert len(flow.steps) == 3
    assert flow.steps[0]["2.bias"].rms == pytest.approx(2.0)  # two rows, each of gradient 1
    assert flow.verdicts()["0.weight"] == "vanishing"
    assert flow.verdicts()["2.bias"] == "ok"
    assert flow.verdicts()["empty"] == "dead"
    assert flow.summary()["2.bias"].largest == 2.0
    assert len(flow.plot().axes) == 2


def test_gradient_flow_goes_from_the_first_layer_to_the_last_and_survives_a_failed_pass() -> None:
    model = nn.Sequential(
        *(layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.Sigmoid())), nn.Linear(4, 1)
    )
    with GradientFlow(model) as flow:
        model(torch.ones(2, 4)).sum().backward()
        hidden = model[:10](torch.ones(2, 4))
        hidden.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[10:](hidden).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    assert len(flow.steps) == 2
    verdicts = flow.verdicts()
    assert next(iter(verdicts)).startswith("0.")
    assert verdicts["0.weight"] == "vanishing"
    assert verdicts["18.weight"] == verdicts["16.weight"] == "ok"
    assert flow.verdicts(last=1)["18.weight"] == "ok"


def test_gradient_flow_tells_scaled_gradients_as_they_are() -> None:
    flows = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        table = nn.Embedding(5, 2)
        with GradientFlow(table, scaler=scaler) as flow:
            loss = (table(torch.tensor([1, 1, 3])) * torch.tensor([2.0, 0.0])).sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
        flows.append(flow.steps[0]["weight"])
    assert flows[0].rms == pytest.approx(((4**2 + 2**2) / 10) ** 0.5)
    assert (flows[0].largest, flows[0].zero) == (4.0, pytest.approx(0.8))
    assert flows[0] == flows[1]
