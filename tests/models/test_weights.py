"""Weights in files: safetensors read without code, and the number of classes read from the model's own head."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from explain import ModelError
from explain.models import load
from explain.models.weights import DTYPES, read_safetensors, read_weights


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_safetensors_give_what_was_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors comes with an extra")
    tensors = {
        f"{name}.{i}": torch.randn(shape).mul(9).to(dtype)
        for name, dtype in DTYPES.items()
        for i, shape in enumerate([(2, 3), (), (0, 4), (5,)])
    }
    library.save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "all.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist(), name


def test_safetensors_are_read_as_the_format_says_wherever_the_bytes_lie(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "F32", "shape": [1, 2], "data_offsets": [1, 9]},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "__metadata__": {"a": "text"},
    }
    data = b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    found = read_safetensors(write(tmp_path / "odd.safetensors", header, data))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [7], "b": [[1.5, -2.0]]}


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": ONE}, bytes(7), "cut off"),
        ({"a": ONE}, bytes(9), "more bytes than its header says"),
        ({"a": ONE, "b": ONE}, bytes(16), "overlap"),
        ({"a": {**ONE, "data_offsets": [4, 12]}}, bytes(12), "leave a gap"),
        ({"a": {**ONE, "shape": [3]}}, bytes(8), "do not fit its shape"),
        ({"a": {**ONE, "shape": [-1, -2]}}, bytes(8), "not understood"),
        ({"a": {**ONE, "dtype": "complex"}}, bytes(8), "not understood"),
        ({"a": 3}, b"", "not understood"),
        ([], b"", "no table"),
        (b"{nonsense", b"", "no JSON"),
        (b"[" * 100_000, b"", "no JSON"),
    ],
)
def test_damaged_safetensors_are_refused_with_a_reason(tmp_path: Path, header: Any, data: bytes, reason: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ModelError, match=rf"bad.safetensors' cannot be read \(.*{reason}.*safetensors.torch.save_file"):
        read_weights(path)


def test_files_that_only_have_the_name_of_safetensors_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "torch.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    for name in ("torch.safetensors", "short.safetensors"):
        with pytest.raises(ModelError, match="cannot"):
            read_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1", "mobilenet_v3_small"])
def test_the_number_of_classes_is_read_from_the_head_in_any_order_of_names(name: str, tmp_path: Path) -> None:
    state = torchvision.models.get_model(name, num_classes=7).state_dict()
    backwards = dict(sorted(state.items(), reverse=True))
    torch.save(backwards, tmp_path / "backwards.pt")
    found = load(name, weights=tmp_path / "backwards.pt")
    assert found.categories is None
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.model.state_dict().items())


def test_published_models_take_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors comes with an extra")
    state = torchvision.models.squeezenet1_1(num_classes=3).state_dict()
    library.save_file(state, tmp_path / "own.safetensors")
    found = load("squeezenet1_1", weights=tmp_path / "own.safetensors")
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.model.state_dict().items())
    assert "own.safetensors (sha256 " in str(found.weights)


def test_weights_without_the_head_say_what_is_missing(tmp_path: Path) -> None:
    state = torchvision.models.squeezenet1_1().state_dict()
    torch.save({key: value for key, value in state.items() if "classifier" not in key}, tmp_path / "none.pt")
    with pytest.raises(ModelError, match=r"classifier.1.weight is missing"):
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
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for name in whole.namelist():
            bomb.writestr(name, whole.read(name), zipfile.ZIP_DEFLATED)
    assert read_weights(tmp_path / "whole.pt").keys() == {"a"}
    with pytest.raises(ModelError, match="unpacked"):
        read_weights(tmp_path / "bomb.pt")
