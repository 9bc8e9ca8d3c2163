"""Arrays without a buffer interface: what they say of their memory by DLPack or by an array interface.

The sizes are Python's integers, so no product of them overflows. Nothing that an array says is believed unchecked.

Source: "Python Specification for DLPack" and dlpack.h 1.1; "The array interface protocol" of NumPy, version 3; "CUDA
Array Interface", version 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ndpy._core import ArrayMemory as ArrayMemory
from ndpy._core import Tensor
from ndpy.errors import InvalidBufferError
from ndpy.objects.cuda import LEGACY_STREAM

# Of dlpack.h: types of devices, the type of elements that are addresses, and flags.
_CPU, _CUDA, _CUDA_HOST, _ROCM, _ROCM_HOST = 1, 2, 3, 10, 11
_HOST = (_CPU, _CUDA_HOST, _ROCM_HOST)
_DEVICES = {
    _CUDA: "CUDA",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    9: "VPI",
    _ROCM: "ROCm",
    13: "managed CUDA",
    14: "oneAPI",
    15: "WebGPU",
    16: "Hexagon",
    17: "MAIA",
    18: "Trainium",
}
_OPAQUE = 3
_READ_ONLY, _IS_COPIED, _IS_PADDED = 1, 2, 4
# Libraries whose arrays never change, and whose capsules may not say so.
_IMMUTABLE = ("jax", "jaxlib")
# The newest version of DLPack that is understood here.
_VERSION = (1, 1)
_LONGEST = (1 << 63) - 1

CONTIGUOUS = (
    "is not C-contiguous: its bytes have gaps, or another order than its elements; give a contiguous copy "
    "(numpy.ascontiguousarray(), tensor.contiguous(), bytes()), or fill contiguous memory and copy from that"
)
OBJECTS = (
    "holds Python objects, so its bytes are addresses, which mean nothing elsewhere; give an array of numbers, or the "
    "bytes that pickle makes of it"
)


class Device(NamedTuple):
    """Where memory is that is not the host's.

    Attributes:
        kind: the type of dlpack.h.
        number: None if the array does not say it.
        stream: of CUDA, what has to end before the memory has its contents. None if it has them already.
    """

    kind: int
    number: int | None
    stream: int | None = None

    @property
    def is_cuda(self) -> bool:
        return self.kind == _CUDA

    def __str__(self) -> str:
        kind = _DEVICES.get(self.kind, f"type {self.kind}")
        return f"a {kind} device" if self.number is None else f"{kind} device {self.number}"


class _NotGivenError(Exception):
    """The array does not give its memory by this protocol. Another one may have it."""


def array_memory(array: Any) -> ArrayMemory | None:
    """Return the memory of an array, or None if it offers none. The memory keeps the array. Memory is its own memory.

    Raises:
        InvalidBufferError: its bytes have gaps or another order, or are addresses, or what it says is not possible.
    """
    if isinstance(array, ArrayMemory):
        return array
    if isinstance(array, type):
        return None
    failure: _NotGivenError | None = None
    for way in (_by_dlpack, _by_interface, _by_cuda_interface):
        try:
            memory = way(array)
        except _NotGivenError as error:
            failure = failure or error
        else:
            if memory is not None:
                return memory
    if failure is None:
        return None
    raise InvalidBufferError(
        f"the {_name(array)} gives no view of its bytes ({failure}); give a view as bytes or numbers, such as "
        f"array.view('u1') or tensor.detach()"
    ) from failure.__cause__


def _name(array: Any) -> str:
    return type(array).__name__


def _asked(call: Callable[[], Any]) -> Any:
    """What an array answers."""
    try:
        return call()
    except Exception as error:
        raise _NotGivenError(f"{type(error).__name__}: {error}") from error


# ---- DLPack ----


def _by_dlpack(array: Any) -> ArrayMemory | None:
    if getattr(type(array), "__dlpack__", None) is None:
        return None
    if _is_negated(array):
        raise InvalidBufferError(f"the {_name(array)} is to be negated when it is read; give array.resolve_neg()")
    tensor = _asked(lambda: Tensor(_capsule(array)))
    data, offset, shape, strides, (code, bits, lanes), device, flags = _asked(tensor.describe)
    where = None if device[0] in _HOST else Device(*device)
    if where is not None and where.is_cuda:
        # Without a stream, some libraries order the contents behind no stream at all.
        where = where._replace(stream=LEGACY_STREAM)
        tensor = _asked(lambda: Tensor(_capsule(array, stream=LEGACY_STREAM)))
        data, offset, shape, strides, (code, bits, lanes), device, flags = _asked(tensor.describe)
    if flags & _IS_COPIED:
        raise InvalidBufferError(f"the {_name(array)} gives only a copy of its bytes; give the copy itself")
    if code == _OPAQUE:
        raise InvalidBufferError(f"the {_name(array)} {OBJECTS}")
    # Elements of less than a byte follow each other without gaps, unless it says otherwise.
    item_bits = lanes * (max(bits, 8) if flags & _IS_PADDED else bits)
    address = data + offset if data else 0
    readonly = bool(flags & _READ_ONLY) or type(array).__module__.partition(".")[0] in _IMMUTABLE
    return _checked(array, tensor, address, shape, strides, 1, item_bits, readonly, where)


def _is_negated(array: Any) -> bool:
    """Whether its bytes are the opposite of its numbers. PyTorch has such tensors, and its capsules do not say so."""
    is_neg = getattr(array, "is_neg", None)
    return callable(is_neg) and bool(_asked(is_neg))


def _capsule(array: Any, **stream: int) -> Any:
    try:
        return array.__dlpack__(max_version=_VERSION, copy=False, **stream)
    except TypeError:
        # The first version of the protocol has no such parameters, and never copies.
        return array.__dlpack__(**stream)


# ---- array interfaces ----

# The kinds of elements that NumPy's page names.
_TYPE = re.compile(r"[<>|=]([tbiufcmMOSUV])(\d{1,18})(\[.*\])?")


def _by_interface(array: Any) -> ArrayMemory | None:
    interface = _interface(array, "__array_interface__")
    return None if interface is None else _described(array, interface, None)


def _by_cuda_interface(array: Any) -> ArrayMemory | None:
    interface = _interface(array, "__cuda_array_interface__")
    if interface is None:
        return None
    # Before version 3 there were no streams, and the contents were there.
    stream = interface.get("stream")
    if stream is not None and (not isinstance(stream, int) or not 0 < stream < 1 << 64):
        raise _NotGivenError(f"the stream in its array interface is {stream!r:.80}, which is not a stream")
    return _described(array, interface, Device(_CUDA, None, stream))


def _interface(array: Any, name: str) -> dict[str, Any] | None:
    interface = _asked(lambda: getattr(array, name, None))
    if interface is not None and not isinstance(interface, dict):
        raise _NotGivenError(f"its {name} is a {type(interface).__name__}, not a dict")
    return interface


def _described(array: Any, interface: dict[str, Any], device: Device | None) -> ArrayMemory:
    address, readonly = _data_of(interface.get("data"))
    if interface.get("mask") is not None:
        raise InvalidBufferError(
            f"the {_name(array)} has a mask, which would not be transferred; give its data and its mask one by one"
        )
    shape, strides = _numbers(interface, "shape"), None
    if interface.get("strides") is not None:
        strides = _numbers(interface, "strides")
    item_bits = _bits_of(interface.get("typestr"))
    if not item_bits or _has_objects(interface.get("descr")):
        raise InvalidBufferError(f"the {_name(array)} {OBJECTS}")
    return _checked(array, interface, address, shape, strides, item_bits // 8, item_bits, readonly, device)


def _data_of(data: Any) -> tuple[int, bool]:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], int) and 0 <= data[0] < 1 << 64:
        return data[0], bool(data[1])
    raise _NotGivenError("its array interface has no address, so it would give a copy")


def _numbers(interface: dict[str, Any], name: str) -> tuple[int, ...]:
    numbers = interface.get(name)
    if not isinstance(numbers, tuple) or not all(isinstance(number, int) for number in numbers):
        raise _NotGivenError(f"the {name} in its array interface is not a tuple of integers")
    return numbers


def _bits_of(typestr: Any) -> int:
    """How many bits an element has. 0 for Python objects."""
    parts = _TYPE.fullmatch(typestr) if isinstance(typestr, str) else None
    if parts is None:
        raise _NotGivenError(f"the typestr in its array interface is {typestr!r:.80}")
    kind, size = parts[1], int(parts[2])
    # Elements of the kind t are counted in bits, and those of U in characters of 4 bytes.
    return 0 if kind == "O" else size * {"t": 1, "U": 32}.get(kind, 8)


def _has_objects(descr: Any) -> bool:
    """Whether a field of a structure holds Python objects."""
    if isinstance(descr, str):
        parts = _TYPE.fullmatch(descr)
        return parts is not None and parts[1] == "O"
    return isinstance(descr, list) and any(
        isinstance(field, tuple) and len(field) > 1 and _has_objects(field[1]) for field in descr
    )


# ---- what both say ----


def _checked(
    array: Any,
    owner: Any,
    address: int,
    shape: Iterable[int],
    strides: Iterable[int] | None,
    item: int,
    item_bits: int,
    readonly: bool,
    device: Device | None,
) -> ArrayMemory:
    """owner: what keeps the memory. item: what a step of one element is in `strides`."""
    name, shape = _name(array), tuple(shape)
    if item_bits < 1 or any(extent < 0 for extent in shape):
        raise InvalidBufferError(f"the {name} has the shape {shape} of elements of {item_bits} bits")
    if strides is not None and not _is_contiguous(shape, tuple(strides), item):
        raise InvalidBufferError(f"the {name} {CONTIGUOUS}")
    bits = math.prod(shape) * item_bits
    if bits % 8:
        raise InvalidBufferError(
            f"the {name} has {math.prod(shape)} elements of {item_bits} bits, which do not fill whole bytes; give a "
            f"number of elements that does, or a view as bytes"
        )
    length = bits // 8
    if length > _LONGEST or address + length > 1 << 64 or (length and not address):
        raise InvalidBufferError(f"the {name} says that its {length} bytes are at {address:#x}, which is not possible")
    return ArrayMemory(array, owner, address, length, readonly, device)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    if len(strides) != len(shape):
        return False
    if 0 in shape:
        return True
    expected = item
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        # With one element there is no next one, so its distance says nothing.
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
