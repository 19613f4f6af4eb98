"""Files of safetensors: the length of a header, the header in JSON, and the bytes of the tensors. They hold no code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from explain.errors import ModelError

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
