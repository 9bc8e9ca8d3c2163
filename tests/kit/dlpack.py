"""A producer of DLPack capsules that says what a test wants. It is written by dlpack.h, not by ndpy."""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA, ROCM = 1, 2, 10


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plain(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# What capsules point to: until the end of the process, because a capsule of a failed test may live for long.
_forever: list[Any] = []


class Producer:
    """An array. shape, strides: in elements; the strides may be None.

    Attributes:
        asked: the keywords of each call of __dlpack__().
    """

    def __init__(
        self,
        memory: Any = None,
        shape: tuple[int, ...] = (),
        strides: tuple[int, ...] | None = None,
        *,
        dtype: tuple[int, int, int] = (1, 8, 1),
        device: tuple[int, int] = (CPU, 0),
        told_device: tuple[int, int] | None = None,
        version: tuple[int, int] | None = (1, 1),
        flags: int = 0,
        offset: int = 0,
        address: int | None = None,
        dimensions: int | None = None,
    ) -> None:
        self.memory, self.shape, self.strides, self.dtype = memory, shape, strides, dtype
        self.device, self.told_device = device, told_device or device
        self.version, self.flags, self.offset, self.address = version, flags, offset, address
        self.dimensions = len(shape) if dimensions is None else dimensions
        self._deleted: list[int] = []
        self.asked: list[dict[str, Any]] = []

    @property
    def deleted(self) -> int:
        """How often its deleter was called."""
        return len(self._deleted)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.told_device

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked.append(keywords)
        if self.version is None and keywords.keys() - {"stream"}:
            raise TypeError("unexpected keyword")
        return self.capsule()

    def capsule(self) -> Any:
        address = self.address
        if address is None:
            address = ctypes.addressof((ctypes.c_char * len(self.memory)).from_buffer(self.memory))
        shape = (ctypes.c_int64 * max(len(self.shape), 1))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * max(len(self.strides), 1))(*self.strides)

        deleted = self._deleted
        deleter = DELETER(lambda address: deleted.append(address))
        managed: Any = Plain() if self.version is None else Versioned(*self.version, flags=self.flags)
        managed.deleter = deleter
        tensor = managed.tensor
        tensor.data, tensor.ndim, tensor.byte_offset = address, self.dimensions, self.offset
        tensor.device, tensor.dtype = Device(*self.device), DataType(*self.dtype)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        if strides is not None:
            tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        _forever.append((managed, deleter, shape, strides, self.memory))
        return _new(ctypes.addressof(managed), name, None)


class Interface:
    """An array with an __array_interface__ of these entries."""

    def __init__(self, memory: Any, **entries: Any) -> None:
        self.memory = memory
        address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (address, False),
            **entries,
        }
