"""Which value a tensor holds, after writes in place and through views.

Tensors that share memory are views of it. A write makes a new value of the written tensor, and all
other tensors in its memory are read again: from the memory as one flat value, of which each is a
strided part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from explain.recording.values import Value

aten = torch.ops.aten
Note = Callable[..., Value]
"""Notes a step without running it: the operator, its arguments, and the shape and type of its
result."""


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its memory: sizes, strides and offset, in elements of its type."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """The geometry of a tensor; sparse and other tensors without strides count as
        contiguous."""
        size = tuple(tensor.shape)
        if tensor.layout == torch.strided:
            return cls(size, tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)
        return cls(size, tuple(torch.empty(size, device="meta").stride()), 0, tensor.dtype)

    def fills(self, count: int) -> bool:
        """Whether each of ``count`` elements of the memory belongs to the tensor exactly once."""
        # from the innermost dimension on, each stride must be as long as what lies inside of it
        length_inside = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1:
                if stride != length_inside:
                    return False
                length_inside *= size
        return self.offset == 0 and length_inside == count

    @property
    def order(self) -> list[int]:
        """The dimensions from the largest stride to the smallest."""
        return sorted(range(len(self.size)), key=lambda axis: (-self.stride[axis], axis))


@dataclass(eq=False, slots=True)
class Memory:
    """Memory that tensors share, and the value that it holds."""

    value: Value
    """The value that was written last as a whole, or else bound first."""
    tensor: Tensor
    """The tensor that held it, without its graph."""
    writer: Tensor
    """The tensor by which it was written last, or else bound first."""
    version: int = 0
    """How often it has been written to."""
    flat: Value | None = None
    """All of it in one dimension, if a part of it was written or read again."""
    views: list[Value] = field(default_factory=list)
    """The values whose tensors lie in it."""

    @property
    def geometry(self) -> Geometry:
        """Where ``value`` lies in it."""
        return Geometry.of(self.tensor)


@dataclass(eq=False, slots=True)
class _Binding:
    """A tensor that holds a value as long as its memory has this version."""

    tensor: Tensor  # kept, so that its id is not used again
    value: Value
    memory: Memory
    version: int


class Aliases:
    """The values of tensors. ``note`` adds a step for what only moves values about, ``leave`` names
    what is done past the record."""

    def __init__(
        self, note: Note, constant: Callable[[Tensor], Value], leave: Callable[[str], None]
    ) -> None:
        self._note = note
        self._leave = leave
        self._constant = constant
        self._bindings: dict[int, _Binding] = {}
        self._memories: dict[int, Memory] = {}

    def read(self, tensor: Tensor) -> Value | None:
        """The value that a tensor holds now; None if its memory is unknown."""
        memory = self._memories.get(memory_of(tensor))
        if memory is None:
            return None
        binding = self._bindings.get(id(tensor))
        if binding is not None and binding.memory is memory and binding.version == memory.version:
            return binding.value
        value = self._flipped(tensor, self._part(memory, Geometry.of(tensor)))
        # then the tensor's gradient is that of what was there before, not of what was written
        if tensor.requires_grad and not memory.writer.requires_grad:
            self._leave("a write past autograd")
        if not tensor.requires_grad and torch.is_grad_enabled():
            # x.data, or another path past autograd: no gradient leads back
            value = self._note(aten.detach.default, value, shape=value.shape, dtype=value.dtype)
        value.kept = tensor.detach()
        self.bind(tensor, value)
        return value

    def bind(self, tensor: Tensor, value: Value) -> None:
        """Let a tensor hold a value, until its memory is written to."""
        key = memory_of(tensor)
        memory = self._memories.get(key)
        if memory is None:
            # a tensor from elsewhere may be a conjugate view of memory that was not seen before
            is_foreign = value.kind in ("input", "constant")
            stored = self._flipped(tensor, value) if is_foreign else value
            memory = self._memories[key] = Memory(
                value=stored, tensor=_without_graph(tensor, value), writer=tensor
            )
        memory.views.append(value)
        self._bindings[id(tensor)] = _Binding(tensor, value, memory, memory.version)

    def before_write(self, tensor: Tensor) -> None:
        """Keep what is still needed of a tensor's memory, just before it is written to."""
        memory = self._memories.get(memory_of(tensor))
        if memory is None:
            return
        # a write into a part is noted as one into the flat memory, made of what is there before
        if memory.flat is None and not Geometry.of(tensor).fills(_count(tensor)):
            self._flatten(memory)
        for value in memory.views:
            # what no step has read may be computed again by the step that made it, if there is one
            needed = value.is_read or value.step is None
            if value.kept is not None:
                value.kept = value.kept.clone() if needed else None
        memory.views.clear()  # none of them lies in it any more

    def written(self, tensor: Tensor, value: Value) -> None:
        """Let a tensor hold the value that was written into it; other views of its memory are
        read again."""
        memory = self._memories.get(memory_of(tensor))
        if memory is None:
            self.bind(tensor, value)
            return
        geometry = Geometry.of(tensor)
        stored = self._flipped(tensor, value)
        memory.version += 1
        memory.writer = tensor
        if geometry.fills(_count(tensor)):
            memory.value = stored
            memory.tensor = _without_graph(tensor, value)
            memory.flat = None
        else:
            assert memory.flat is not None  # made by `before_write`
            memory.flat = self._note(
                as_strided_scatter,
                self._reinterpreted(memory.flat, geometry.dtype),
                stored,
                geometry.size,
                geometry.stride,
                geometry.offset,
                shape=(_count(tensor),),
                dtype=geometry.dtype,
            )
        self.bind(tensor, value)

    def changed_outside(self, tensor: Tensor) -> None:
        """Forget what a tensor's memory holds: constants were written into it."""
        self._memories.pop(memory_of(tensor), None)

    @property
    def bound(self) -> list[tuple[Value, Tensor]]:
        """The values, each with the tensor that holds or held it."""
        return [(binding.value, binding.tensor) for binding in self._bindings.values()]

    def _flipped(self, tensor: Tensor, value: Value) -> Value:
        """The value of a tensor as memory has it, or back, if the tensor is a conjugate or negative
        view."""
        # both undo themselves, so that one function does for both ways
        if tensor.is_conj():
            value = self._note(
                aten.conj_physical.default, value, shape=value.shape, dtype=value.dtype
            )
        if tensor.is_neg():
            value = self._note(aten.neg.default, value, shape=value.shape, dtype=value.dtype)
        return value

    def _part(self, memory: Memory, geometry: Geometry) -> Value:
        """The value of the tensor that lies at ``geometry`` in a memory."""
        if memory.flat is None and geometry == memory.geometry:
            return memory.value
        flat = memory.flat or self._flatten(memory)
        return self._note(
            aten.as_strided.default,
            self._reinterpreted(flat, geometry.dtype),
            geometry.size,
            geometry.stride,
            geometry.offset,
            shape=geometry.size,
            dtype=geometry.dtype,
        )

    def _flatten(self, memory: Memory) -> Value:
        """All of a memory in one dimension, in its own order."""
        geometry = memory.geometry
        count = _count(memory.tensor)
        if geometry.fills(count):
            # dimensions in the order of memory, in which contiguous values are as they lie there
            sizes = tuple(geometry.size[axis] for axis in geometry.order)
            ordered = self._note(
                aten.permute.default,
                memory.value,
                geometry.order,
                shape=sizes,
                dtype=geometry.dtype,
            )
            contiguous = self._note(
                aten.clone.default,
                ordered,
                memory_format=torch.contiguous_format,
                shape=sizes,
                dtype=geometry.dtype,
            )
            memory.flat = self._note(
                aten.view.default, contiguous, [count], shape=(count,), dtype=geometry.dtype
            )
        else:
            # the known tensor is a part of it, and what lies around counts as constant
            around = memory.tensor.as_strided((count,), (1,), 0)
            memory.flat = self._note(
                as_strided_scatter,
                self._constant(around.clone()),
                memory.value,
                geometry.size,
                geometry.stride,
                geometry.offset,
                shape=(count,),
                dtype=geometry.dtype,
            )
        return memory.flat

    def _reinterpreted(self, flat: Value, dtype: torch.dtype) -> Value:
        """A flat value read as complex numbers, or complex numbers as pairs of real ones."""
        if flat.dtype == dtype:
            return flat
        (count,) = flat.shape
        if flat.dtype.is_complex:
            pairs = self._note(aten.view_as_real.default, flat, shape=(count, 2), dtype=dtype)
            return self._note(
                aten.view.default, pairs, [2 * count], shape=(2 * count,), dtype=dtype
            )
        halved = count // 2
        pairs = self._note(
            aten.view.default, flat, [halved, 2], shape=(halved, 2), dtype=flat.dtype
        )
        return self._note(aten.view_as_complex.default, pairs, shape=(halved,), dtype=dtype)


def as_strided_scatter(
    flat: Tensor, part: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """A copy of ``flat`` with ``part`` in it, as the operator of this name, whose own derivative is
    wrong for parts with gaps (PyTorch 2.14)."""
    result = flat.clone()
    # along a stride of 0 one element is repeated: only the first is written
    once = [count if step else min(count, 1) for count, step in zip(size, stride, strict=True)]
    without_repeats = part[tuple(slice(count) for count in once)]
    result.as_strided(once, stride, offset).copy_(without_repeats)
    return result


def _without_graph(tensor: Tensor, value: Value) -> Tensor:
    """A tensor that holds a value, without its graph."""
    return tensor.detach() if value.kept is None else value.kept


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common; sparse tensors and the like are alone."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        return id(tensor)
    storage_id: int = tensor.untyped_storage()._cdata
    return storage_id


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _count(tensor: Tensor) -> int:
    """How many elements of a tensor's type its memory has."""
    if tensor.layout != torch.strided:
        return tensor.numel()
    return tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
