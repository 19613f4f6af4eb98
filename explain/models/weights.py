"""Weights from a file: tensors only, never code; safetensors is read here."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError, quiet
from explain._utils.spelling import did_you_mean

MAX_HEADER = 100_000_000  # bytes, as the format has it

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool},
}


def read_safetensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of safetensors, by name, in the order of their bytes.

    Raises:
        ModelError: the file is not what its header says.
        OSError: it cannot be read.
    """
    try:
        return _parsed(Path(path))
    except _DamagedError as error:
        raise ModelError(
            f"weights {str(path)!r} cannot be read ({error}); save them again with safetensors.torch.save_file"
        ) from None


class _DamagedError(ModelError):
    """What is wrong with a file, in a few words."""


def _parsed(path: Path) -> dict[str, torch.Tensor]:
    content = bytearray(path.read_bytes())  # writable, so that torch may share its memory
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= length <= min(MAX_HEADER, len(content) - 8):
        raise _DamagedError("its header is cut off or too long")
    try:
        header = json.loads(content[8 : 8 + length].decode())
    except (ValueError, RecursionError):
        raise _DamagedError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _DamagedError("its header is no table of tensors")
    header.pop("__metadata__", None)
    data = memoryview(content)[8 + length :]
    places = {name: _place(name, entry) for name, entry in header.items()}
    found, at = {}, 0
    for name, (dtype, shape, start, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != at or end > len(data):
            raise _DamagedError(f"the bytes of {name!r} overlap, leave a gap or are cut off")
        found[name] = _tensor(data[start:end], dtype).reshape(shape)
        at = end
    if at != len(data):
        raise _DamagedError("it has more bytes than its header says")
    return found


def _place(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return a tensor's type, shape, and where its bytes start and end."""
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _DamagedError(f"the entry of {name!r} is not understood") from None
    numbers = (*shape, start, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _DamagedError(f"the entry of {name!r} is not understood")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise _DamagedError(f"{name!r} has {end - start} bytes, which do not fit its shape")
    return dtype, shape, start, end


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if not len(data):  # which torch.frombuffer refuses
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    aligned = raw.data_ptr() % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype)


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a state dict that was saved with ``torch.save``, alone or under "state_dict", "model" or "model_state_dict",
    or a file of safetensors, which is known by its name.

    Raises:
        ModelError: missing, damaged, or a file that holds more than tensors and would have to run code to load.
    """
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path.is_file, this takes any name for an answer
        raise ModelError(f"weights {str(path)!r} must be a file, but there is none; check the path")
    try:
        with quiet():  # of old formats: what cannot be read is refused below
            content: Any = _read(path)
    except ModelError:
        raise
    except pickle.UnpicklingError:
        raise ModelError(
            f"weights {str(path)!r} must be a PyTorch file with nothing but tensors, but it is of another kind, or has "
            "to run code to load; save model.state_dict() and use that"
        ) from None
    except Exception as error:  # a damaged file may break the reader anywhere
        reason = " ".join(str(error).split())[:100]
        if not re.search("[a-z]{3}", reason):  # a damaged file may break the reader without a clear reason
            reason = "it is not a file of PyTorch"
        raise ModelError(f"weights {str(path)!r} cannot be read ({reason}); save them again with torch.save") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(v, torch.Tensor) for v in content.values())
    ):
        raise ModelError(
            f"weights {str(path)!r} must hold a state dict of tensors; save model.state_dict() and use that"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return read_safetensors(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(each.file_size for each in archive.infolist()) > path.stat().st_size:  # torch.save compresses none
                raise ValueError("it would become larger when it is unpacked")
    return torch.load(path, weights_only=True, map_location="cpu")


def fit_weights(model: nn.Module, state: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Load a state dict into a model of the same kind.

    Raises:
        ModelError: names or shapes differ; the message names the first that does.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own]
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    if missing or extra or wrong:
        if wrong:
            first = f"{wrong[0]} is {tuple(state[wrong[0]].shape)} instead of {tuple(own[wrong[0]].shape)}"
        elif missing:
            first = f"{missing[0]} is missing"
        else:
            first = f"{extra[0]} is not in the model; {did_you_mean(extra[0], own)}"
        raise ModelError(
            f"weights {str(path)!r} must fit the model, but {_told(missing, extra, wrong)} ({first}); take those of "
            "this very network"
        )
    model.load_state_dict(state)


def _told(missing: list[str], extra: list[str], wrong: list[str]) -> str:
    """Say how many tensors do not fit, and why.

    >>> _told(["a"], [], ["b", "c"])
    '1 tensor is missing and 2 tensors have another shape'
    """
    kinds = [(missing, "is missing", "are missing"), (extra, "is unknown", "are unknown")]
    kinds.append((wrong, "has another shape", "have another shape"))
    return " and ".join(
        f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {several}"
        for names, one, several in kinds
        if names
    )


def check_published(content: bytes, sha256: str, name: str, path: Path, package: str) -> None:
    """Refuse weights that are not the published ones to the bit.

    Raises:
        ModelError: their hash is another one.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise ModelError(
            f"model {name!r} must have the published weights (sha256 {sha256[:12]}…), got {digest[:12]}… in "
            f"{str(path)!r}; install {package} again"
        )


def describe_weights(path: str | Path) -> str:
    """Return the name of a file of weights and its SHA-256, for a record."""
    with Path(path).open("rb") as file:
        return f"{path} (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
