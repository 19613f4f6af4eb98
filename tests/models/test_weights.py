"""Weights in files: safetensors read without code, and the number of classes read from the model's
own head."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

import explain
from explain import ExplainWarning, ModelError
from explain.models import load
from explain.models.weights import read_weights


def test_safetensors_of_every_type_are_read(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(kind): torch.randn(2, 3).mul(9).to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt"})
    loaded = read_weights(tmp_path / "all.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.filterwarnings("ignore:::timm")
@pytest.mark.parametrize(
    "name", ["squeezenet1_1", "mobilenet_v3_small", "timm:test_resnet", "timm:test_vit"]
)
def test_the_number_of_classes_is_read_from_the_head_in_any_order_of_names(
    name: str, tmp_path: Path
) -> None:
    create = torchvision.models.get_model
    if name.startswith("timm:"):
        create = pytest.importorskip("timm", reason="timm is an extra").create_model
    state = create(name.removeprefix("timm:"), num_classes=7).state_dict()
    torch.save(dict(sorted(state.items(), reverse=True)), tmp_path / "backwards.pt")
    loaded = load(name, weights=tmp_path / "backwards.pt")
    assert loaded.categories is None
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.model.state_dict().items())
    with pytest.warns(ExplainWarning, match="assumed"):
        explain.Explainer(loaded)


def test_weights_that_unpack_to_more_than_their_file_are_refused_unread(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2**16)}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb,
    ):
        for name in whole.namelist():
            bomb.writestr(name, whole.read(name), zipfile.ZIP_DEFLATED)
    assert read_weights(tmp_path / "whole.pt").keys() == {"a"}
    with pytest.raises(ModelError, match="unpacked"):
        read_weights(tmp_path / "bomb.pt")
