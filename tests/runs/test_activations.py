"""Activations on disk are those of the model, after every kind of interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from explain.hooks import ActivationStore, capture
from tests.conftest import TinyNet, settled


def photos(count: int = 11) -> torch.Tensor:
    return torch.rand(count, 3, 12, 10, generator=torch.Generator().manual_seed(0))


def expected(model: nn.Module, layer: str) -> np.ndarray:
    with torch.no_grad(), capture(model, layer, gradients=False) as seen:
        model(photos())
    return seen.activations[layer].numpy()


def test_what_is_stored_is_what_layers_give(tmp_path: Path) -> None:
    model = settled(TinyNet()).eval()
    store = ActivationStore(tmp_path, model, ["layer1", "fc"], dtype="float32")
    store.collect(photos(), batch_size=4)
    read = ActivationStore(tmp_path)
    assert (len(read), read.layers) == (11, ["layer1", "fc"])
    assert isinstance(read["layer1"], np.memmap)
    for layer in read.layers:
        np.testing.assert_allclose(read[layer], expected(model, layer), rtol=1e-5, atol=1e-5)


def test_units_and_precision_are_chosen(tmp_path: Path) -> None:
    model = settled(TinyNet()).eval()
    store = ActivationStore(tmp_path, model, "layer1", channels=[4, 1])
    store.collect(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(photos(), torch.arange(11)), batch_size=3))
    assert store["layer1"].dtype == np.float16
    np.testing.assert_allclose(store["layer1"], expected(model, "layer1")[:, [4, 1]], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("breaks_at", [0, 1, 4, 9])
def test_collecting_goes_on_where_it_was_interrupted(tmp_path: Path, breaks_at: int) -> None:
    model = settled(TinyNet()).eval()

    def breaking() -> Iterator[torch.Tensor]:
        for i, photo in enumerate(photos()):
            if i == breaks_at:
                raise KeyboardInterrupt
            yield photo

    store = ActivationStore(tmp_path, model, ["layer1", "fc"], dtype="float32")
    with pytest.raises(KeyboardInterrupt):
        store.collect(breaking(), batch_size=2)
    if breaks_at >= 4:  # as if it had been killed while it wrote
        with (tmp_path / "000.bin").open("ab") as file:
            file.write(b"half a batch")
    again = ActivationStore(tmp_path, model, ["layer1", "fc"], dtype="float32")
    assert len(again) == breaks_at // 2 * 2
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    again.collect(photos(), batch_size=2)
    assert sum(seen) == 11 - breaks_at // 2 * 2
    for layer in again.layers:
        np.testing.assert_allclose(again[layer], expected(model, layer), rtol=1e-5, atol=1e-5)
