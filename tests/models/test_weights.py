"""Weights in files: safetensors read without code, and the number of classes read from the model's
own head."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from explain import ModelError
from explain.models import load
from explain.models.weights import read_weights


def test_safetensors_of_every_type_are_read(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(kind): torch.randn(2, 3).mul(9).to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt"})
    found = read_weights(tmp_path / "all.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kept", [slice(0, -1), slice(0, 20), slice(9, None)])
def test_damaged_safetensors_are_refused_with_a_reason(tmp_path: Path, kept: slice) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"a": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes()[kept])
    with pytest.raises(ModelError, match=r"bad.safetensors' cannot be read"):
        read_weights(path)


def test_files_that_only_have_the_name_of_safetensors_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "torch.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    for name in ("torch.safetensors", "short.safetensors"):
        with pytest.raises(ModelError, match="cannot"):
            read_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1", "mobilenet_v3_small"])
def test_the_number_of_classes_is_read_from_the_head_in_any_order_of_names(
    name: str, tmp_path: Path
) -> None:
    state = torchvision.models.get_model(name, num_classes=7).state_dict()
    backwards = dict(sorted(state.items(), reverse=True))
    torch.save(backwards, tmp_path / "backwards.pt")
    found = load(name, weights=tmp_path / "backwards.pt")
    assert found.categories is None
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.model.state_dict().items())


def test_published_models_take_safetensors(tmp_path: Path) -> None:
    state = torchvision.models.squeezenet1_1(num_classes=3).state_dict()
    save_file(state, tmp_path / "own.safetensors")
    found = load("squeezenet1_1", weights=tmp_path / "own.safetensors")
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.model.state_dict().items())
    assert "own.safetensors (sha256 " in str(found.weights)


def test_weights_without_the_head_say_what_is_missing(tmp_path: Path) -> None:
    state = torchvision.models.squeezenet1_1().state_dict()
    torch.save(
        {key: value for key, value in state.items() if "classifier" not in key},
        tmp_path / "none.pt",
    )
    with pytest.raises(ModelError, match=r"classifier.1.weight"):
        load("squeezenet1_1", weights=tmp_path / "none.pt")


@pytest.mark.filterwarnings("ignore:::timm")
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_the_number_of_classes_of_timm_is_read_from_the_head(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is an extra")
    state = timm.create_model(name, num_classes=7).state_dict()
    torch.save(dict(sorted(state.items(), reverse=True)), tmp_path / "w.pt")
    found = load(f"timm:{name}", weights=tmp_path / "w.pt")
    assert found.categories is None
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.model.state_dict().items())


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
