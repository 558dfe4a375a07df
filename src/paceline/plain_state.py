"""Encode nested Python state as a JSON document and named tensors, and decode it, without pickle.

Checkpoints use this form, and so do objects that processes send each other (comm/objects.py).

`None`, bools, strings, lists, finite floats, 64-bit ints and dicts with string keys are written as plain JSON.
Everything else is an object with the key "$", which names its type:

    {"$": "tuple", "items": [...]}                   also set, frozenset, torch.Size, deque (with "maxlen")
    {"$": "dict", "items": [[key, value], ...]}      a dict with other keys; also OrderedDict, defaultdict, Counter
    {"$": "tensor", "name": "state/0/exp_avg"}       the tensor of that name, stored beside the document
    {"$": "float", "hex": "..."}                     the 8 bytes of an inf or NaN; also int (hexadecimal) and complex
    {"$": "numpy", "name": ..., "dtype": "<f8", "shape": [...]}     and numpy.scalar
    {"$": "bytes", "base64": "..."}                  also bytearray; torch.dtype and torch.device have a "name"
    {"$": "path", "text": "..."}                     a pathlib.Path; also datetime, date, time, Decimal and UUID
    {"$": "range", "items": [0, 10, 1]}              also timedelta
    {"$": "Namespace", "items": [[name, value]]}     an argparse.Namespace; also types.SimpleNamespace
    {"$": "numbers", "name": "scores"}               a long list of ints or floats, as a tensor; also "long bytes".
                                                     Only in messages, not in checkpoints

A tensor is named by its path ("layer.weight" at the top, "state/0/exp_avg" below), so that the tensors of a model's
state_dict keep the model's names. Dtypes unknown to some safetensors release are stored as real pairs (complex) or as
bytes.

Decoding restores values, types, order, bits, and the memory order of dense tensors (channels_last). It does not restore
devices, `requires_grad` or shared memory: decoded tensors are plain tensors on the host.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import datetime
import decimal
import enum
import gc
import json
import math
import pathlib
import struct
import types
import uuid
from abc import abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError, UsageError
from paceline.torch_private.core import METADATA

Json = Any  # None, bool, int, float, str, list or dict with string keys

MARK = "$"
LONG = 1000  # a list of at least this many numbers, or at least this many bytes, is sent as a tensor
MOST_BRACKETS = 8_000_000  # limit on lists and objects in a saved state's JSON; each takes up to 200 bytes once read
_CHUNK_BYTES = 2**24
DEEPEST = 100  # levels; one level may take three levels of JSON, and Python's recursion limit is 1,000

NATIVE_DTYPES = {  # every safetensors release since 0.4 can read these
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
# torch.from_numpy converts these to native dtypes.
_NATIVE_NUMPY = {"f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "b1"}
_NUMPY_KINDS = "biufcmMSU"  # numbers, times and fixed-length strings: bytes with a dtype, no Python objects
_FACTORIES: dict[str, type] = {t.__name__: t for t in (bool, dict, float, int, list, set, str, tuple)}


@dataclass(frozen=True)
class TensorApart:
    """Stands in a state for a tensor whose values are stored apart from the document and its tensors.

    Attributes:
        meta: the tensor on "meta", with its shape, strides and one of NATIVE_DTYPES.
    """

    meta: Tensor


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a document that are read only when they are needed."""

    @abstractmethod
    def lazy(self, name: str, strides: list[int] | None) -> Any:
        """Return what `decode` puts in place of a tensor. strides: of a permuted memory order, or None."""


class Unreadable(ValueError):
    """The document was not written by `encode`, or a tensor is missing."""


def encode(tree: Any, what: str = "the state", *, sent: bool = False) -> tuple[Json, dict[str, Tensor]]:
    """Encode `tree` as (document, tensors). `decode` reverses it.

    The tensors are detached and share memory with `tree` if possible. So they may be on any device, non-contiguous or
    overlapping.

    Args:
        what: the first words of error messages, such as "tracked 'ema'".
        sent: the state is for another process, not for a file.

    Raises:
        CheckpointError: a value has no exact plain form: functions, classes, modules, objects, namedtuples, sparse
            tensors, subclasses of the types above. The message gives the path in the tree and the remedy.
        UsageError: the same, if `sent`.
    """
    encoder = _Encoder(what, sent)
    document = encoder.node(tree, ())
    assert not encoder.apart, "call encode_apart"
    return document, encoder.tensors


def encode_apart(tree: Any, what: str) -> tuple[Json, dict[str, Tensor], dict[str, TensorApart]]:
    """Encode a tree for a file, as `encode` does. Its TensorAparts are returned by name, and get no tensors."""
    encoder = _Encoder(what, sent=False)
    return encoder.node(tree, ()), encoder.tensors, encoder.apart


def decode(document: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a document. Most of `tensors` are used directly, not copied. Never runs code named by the document.

    Raises:
        Unreadable: `encode` did not write the document, or a tensor is missing.
    """
    try:
        return _decode(document, tensors)
    except Exception as error:  # torch and NumPy may raise anything for untrusted numbers and names
        raise Unreadable(_described(error)) from error


def read(data: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a document given as JSON. Each object is decoded as soon as it is parsed, so no second tree is built.

    Raises:
        Unreadable: `decode` would raise it, the data is not JSON, or it has more than MOST_BRACKETS lists and objects
            (counted before parsing).
    """
    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:  # some brackets may be inside strings
        found = _count_brackets(data)
        if found > MOST_BRACKETS:
            raise Unreadable(f"it has {found:,} lists and dicts, too many for a state")
    try:
        with _no_collection():
            return json.loads(data, object_hook=lambda node: _finish(node, tensors))
    except Exception as error:  # as in `decode`
        raise Unreadable(_described(error)) from error


def _count_brackets(data: bytes) -> int:
    """Count the lists and dicts of a JSON document, without parsing it."""
    plain = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)  # removes quotes inside strings
    found, inside = 0, False
    for start in range(0, len(plain), _CHUNK_BYTES):
        part = plain[start : start + _CHUNK_BYTES]
        quotes = part == ord('"')
        quotes[0] ^= inside
        within = np.logical_xor.accumulate(quotes)
        found += int(np.count_nonzero(((part == ord("[")) | (part == ord("{"))) & ~within))
        inside = bool(within[-1])
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's garbage collector, which would scan the growing tree repeatedly and find no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def native_dtype(name: str) -> torch.dtype:
    """The dtype of this name, such as "float32". Raises ValueError if it is not one of NATIVE_DTYPES."""
    found = _dtype(name)
    if found not in NATIVE_DTYPES:
        raise ValueError(f"{name} is not a dtype of a file of tensors")
    return found


def empty(shape: Sequence[int], strides: list[int] | None, dtype: torch.dtype) -> Tensor:
    """A tensor with undefined values and, if given, a permuted memory order."""
    if strides is None:
        return torch.empty(shape, dtype=dtype)
    if not _is_dense(shape, strides):  # otherwise a few bytes could request any amount of memory
        raise ValueError(f"strides {strides} for the shape {list(shape)}")
    return torch.empty_strided(shape, strides, dtype=dtype)


def decode_saved(document: Json, tensors: Mapping[str, Tensor], what: str) -> Any:
    """Decode a checkpoint's document. Raises CheckpointError, with `what` as the checkpoint's name."""
    with _of_checkpoint(what):
        return decode(document, tensors)


def read_saved(data: bytes, tensors: Mapping[str, Tensor], what: str) -> Any:
    """Decode a checkpoint's JSON. Raises CheckpointError, with `what` as the checkpoint's name."""
    with _of_checkpoint(what):
        return read(data, tensors)


@contextlib.contextmanager
def _of_checkpoint(what: str) -> Iterator[None]:
    try:
        yield
    except Unreadable as error:
        raise CheckpointError(
            f"{what} cannot be read back: {error}. It is damaged, does not fit its tensors, or was written by another "
            "program. Use another checkpoint."
        ) from error


class _Encoder:
    """Encodes one tree. In its methods, `path` holds the keys and indices from the root to a value."""

    def __init__(self, what: str, sent: bool) -> None:
        self.what, self.sent = what, sent
        self.tensors: dict[str, Tensor] = {}
        self.apart: dict[str, TensorApart] = {}
        self._open: set[int] = set()  # ids of the containers being encoded; a cycle reaches one of them again
        self._brackets = 0  # upper bound on the lists and objects in the JSON so far
        self._hashed = 0  # > 0 in dict keys and set members, where tensors are compared by identity, not value

    def node(self, value: Any, path: tuple[Any, ...]) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int and -(2**63) <= value < 2**63:
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind in _CONTAINERS:
            return self._container(value, path)
        self._count(3, path)  # at most the object, "strides" and "shape"
        if kind is int:
            return {MARK: "int", "hex": hex(value)}
        if kind is float:
            return {MARK: "float", "hex": struct.pack("<d", value).hex()}
        if kind is Tensor or kind is torch.nn.Parameter:
            return self._tensor(value, path)
        if isinstance(value, TensorApart):
            strides = _permuted_strides(value.meta)
            self.apart[name := self._name(path)] = value
            return {MARK: "tensor", **({"strides": strides} if strides else {}), "name": name}
        if kind is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
            return {MARK: "numpy.scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        if kind is bytes and self.sent and len(value) >= LONG:
            content = torch.frombuffer(bytearray(value), dtype=torch.uint8)  # torch would warn about read-only bytes
            return {MARK: "long bytes", "name": self._add_tensor(content, path)}
        if kind in _SIMPLE:
            return {MARK: _NAMES[kind], **_SIMPLE[kind](value)}
        raise self._refuse(path, *_refusal(value))

    def _container(self, value: Any, path: tuple[Any, ...]) -> Json:
        if id(value) in self._open:
            raise self._refuse(path, "a container that contains itself", "Remove the cycle from the state.")
        if len(path) >= DEEPEST:
            raise self._refuse(path, f"a container nested {DEEPEST} levels deep", "Flatten it.")
        self._count(1, path)
        self._open.add(id(value))
        try:
            mapping = isinstance(value, (dict, *_NAMESPACES))
            return self._mapping(value, path) if mapping else self._sequence(value, path)
        finally:
            self._open.remove(id(value))

    def _count(self, brackets: int, path: tuple[Any, ...]) -> None:
        self._brackets += brackets
        if self._brackets > MOST_BRACKETS and not self.sent:  # `read` would refuse it
            raise self._refuse(
                path,
                f"a state with more than {MOST_BRACKETS:,} lists, dict entries and similar",
                "Store them in tensors or numpy arrays, which need far less memory and time.",
            )

    def _mapping(self, value: Any, path: tuple[Any, ...]) -> Json:
        kind = type(value)
        entries = vars(value) if kind in _NAMESPACES else value
        if kind is dict and all(type(key) is str for key in value) and MARK not in value:
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        self._count(1 + len(entries), path)
        items = [[self._key(key, (*path, key)), self.node(item, (*path, key))] for key, item in entries.items()]
        node: dict[str, Json] = {MARK: _NAMES[kind], "items": items}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise self._refuse(
                    path, "a defaultdict with a function as factory", f"Known factories: {', '.join(_FACTORIES)}."
                )
            node["default"] = None if factory is None else factory.__name__
        # A module's state_dict stores the version of each layer's format here, for load_state_dict.
        if isinstance(value, OrderedDict) and hasattr(value, METADATA):
            node["metadata"] = self.node(getattr(value, METADATA), (*path, METADATA))
        return node

    def _sequence(self, value: Any, path: tuple[Any, ...]) -> Json:
        kind = type(value)
        if kind is list and self.sent and len(value) >= LONG and (numbers := _numbers(value)) is not None:
            return {MARK: "numbers", "name": self._add_tensor(numbers, path)}
        if kind is set or kind is frozenset:
            # Sorted, because hashes differ between processes. Equal states give equal files.
            items = sorted((self._key(item, (*path, item)) for item in value), key=json.dumps)
        else:
            items = [self.node(item, (*path, index)) for index, item in enumerate(value)]
        if kind is list:
            return items
        self._count(1, path)
        node: dict[str, Json] = {MARK: _NAMES[kind], "items": items}
        if isinstance(value, deque):
            node["maxlen"] = value.maxlen
        return node

    def _key(self, key: Any, path: tuple[Any, ...]) -> Json:
        self._hashed += 1
        try:
            return self.node(key, path)
        finally:
            self._hashed -= 1

    def _tensor(self, value: Tensor, path: tuple[Any, ...]) -> Json:
        if self._hashed or value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise self._refuse(path, *_refusal(value, hashed=self._hashed > 0))
        value = value.detach()
        node: dict[str, Json] = {MARK: "tensor"}
        if strides := _permuted_strides(value):
            node["strides"] = strides
        if value.is_complex():
            node["dtype"] = _dtype_name(value.dtype)
            value = torch.view_as_real(value.resolve_conj())
        elif value.dtype not in NATIVE_DTYPES:
            node.update(dtype=_dtype_name(value.dtype), shape=list(value.shape))
            value = value.contiguous().reshape(-1).view(torch.uint8)
        node["name"] = self._add_tensor(value, path)
        return node

    def _array(self, value: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Json:
        node = {MARK: "numpy", "dtype": value.dtype.str, "shape": list(value.shape)}
        if value.dtype.isnative and value.dtype.str[1:] in _NATIVE_NUMPY:
            plain = value if value.flags.c_contiguous and value.flags.writeable else value.copy(order="C")
        else:
            plain = np.frombuffer(bytearray(value.tobytes()), np.uint8)
        node["name"] = self._add_tensor(torch.from_numpy(plain), path)
        return node

    def _add_tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """Store a tensor, and return its name."""
        self.tensors[name := self._name(path)] = tensor
        return name

    def _name(self, path: tuple[Any, ...]) -> str:
        """The name of a tensor: its path, unique, and valid in safetensors and UTF-8."""
        joined = "/".join(part if isinstance(part, str) else str(part) for part in path)
        joined = joined.encode("utf-8", "backslashreplace").decode()
        name, number = joined, 1
        while name in self.tensors or name in self.apart or name == "__metadata__":  # reserved by safetensors
            number += 1
            name = f"{joined}#{number}"
        return name

    def _refuse(self, path: tuple[Any, ...], described: str, remedy: str) -> CheckpointError | UsageError:
        kind, done = (UsageError, "sent") if self.sent else (CheckpointError, "saved")
        return kind(f"{self.what}{_spell(path)}: {described} cannot be {done}. {remedy}")


def _numbers(values: list[Any]) -> Tensor | None:
    """Convert a list of only floats or only 64-bit ints to a tensor, (len(values),). Returns None for other lists."""
    kinds = set(map(type, values))
    if kinds == {float} or (kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63):
        return torch.from_numpy(np.array(values, np.float64 if kinds == {float} else np.int64))
    return None


def _permuted_strides(value: Tensor) -> list[int] | None:
    """Return the strides of a dense tensor with a permuted memory order (such as channels_last), else None."""
    if value.is_contiguous():
        return None
    return list(value.stride()) if _is_dense(value.shape, value.stride()) else None


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor with these strides has no gaps and no overlapping elements."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_CONTAINERS = {dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset, deque, torch.Size, *_NAMESPACES}
_SIMPLE: dict[type, Callable[[Any], dict[str, Json]]] = {
    complex: lambda value: {"hex": struct.pack("<dd", value.real, value.imag).hex()},
    bytes: lambda value: {"base64": base64.b64encode(value).decode()},
    bytearray: lambda value: {"base64": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"name": _dtype_name(value)},
    torch.device: lambda value: {"name": str(value)},
    type(pathlib.Path()): lambda value: {"text": str(value)},
    datetime.datetime: lambda value: {"text": value.isoformat()},
    datetime.date: lambda value: {"text": value.isoformat()},
    datetime.time: lambda value: {"text": value.isoformat()},
    datetime.timedelta: lambda value: {"items": [value.days, value.seconds, value.microseconds]},
    decimal.Decimal: lambda value: {"text": str(value)},
    uuid.UUID: lambda value: {"text": str(value)},
    range: lambda value: {"items": [value.start, value.stop, value.step]},
}
_NAMES = {kind: kind.__name__ for kind in (*_CONTAINERS, *_SIMPLE)}
_NAMES |= {torch.Size: "torch.Size", torch.dtype: "torch.dtype", torch.device: "torch.device"}
_NAMES |= {type(pathlib.Path()): "path"}


def _decode(node: Json, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) if isinstance(item, (list, dict)) else item for item in node]
    if not isinstance(node, dict):
        return node
    return _finish({key: _decode(item, tensors) for key, item in node.items()}, tensors)


def _finish(node: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Decode an object after its entries were decoded."""
    return _DECODERS[node[MARK]](node, tensors) if MARK in node else node


def _ordered_dict(node: Json) -> OrderedDict[Any, Any]:
    result = OrderedDict(node["items"])
    if "metadata" in node:
        setattr(result, METADATA, node["metadata"])
    return result


def _default_dict(node: Json) -> defaultdict[Any, Any]:
    factory = None if node["default"] is None else _FACTORIES[node["default"]]
    return defaultdict(factory, node["items"])


def _namespace(kind: type, node: Json) -> Any:
    result = kind()
    vars(result).update(node["items"])
    return result


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _tensor(node: Json, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tensors, LazyTensors) and "dtype" not in node:
        return tensors.lazy(node["name"], node.get("strides"))
    value = tensors[node["name"]]
    if "shape" in node:
        value = value.view(_dtype(node["dtype"])).reshape(node["shape"])
    elif "dtype" in node:
        value = value.view(_dtype(node["dtype"])).squeeze(-1)  # view_as_complex supports fewer dtypes
    if "strides" in node:
        value = empty(value.shape, node["strides"], value.dtype).copy_(value)
    return value


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"a numpy array of dtype {name!r} is never saved")
    return dtype


def _array(node: Json, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    plain, dtype, shape = tensors[node["name"]].numpy(), _numpy_dtype(node["dtype"]), tuple(node["shape"])
    if plain.dtype == dtype and plain.shape == shape:
        return plain
    if math.prod(shape) * dtype.itemsize != plain.nbytes:
        raise ValueError(f"{plain.nbytes} bytes for an array of shape {shape} and dtype {dtype}")
    return np.ndarray(shape, dtype, buffer=plain.data) if plain.nbytes else np.zeros(shape, dtype)


def _scalar(node: Json) -> Any:
    dtype, data = _numpy_dtype(node["dtype"]), bytes.fromhex(node["hex"])
    if dtype.itemsize and not data:
        raise ValueError(f"no bytes for a number of dtype {dtype}")
    return (np.ndarray((), dtype, buffer=data) if data else np.zeros((), dtype))[()]


_DECODERS: dict[str, Callable[[Json, Mapping[str, Tensor]], Any]] = {
    "dict": lambda node, tensors: dict(node["items"]),
    "OrderedDict": lambda node, tensors: _ordered_dict(node),
    "defaultdict": lambda node, tensors: _default_dict(node),
    "Counter": lambda node, tensors: Counter(dict(node["items"])),
    "tuple": lambda node, tensors: tuple(node["items"]),
    "set": lambda node, tensors: set(node["items"]),
    "frozenset": lambda node, tensors: frozenset(node["items"]),
    "torch.Size": lambda node, tensors: torch.Size(node["items"]),
    "deque": lambda node, tensors: deque(node["items"], node["maxlen"]),
    "int": lambda node, tensors: int(node["hex"], 16),
    "float": lambda node, tensors: struct.unpack("<d", bytes.fromhex(node["hex"]))[0],
    "complex": lambda node, tensors: complex(*struct.unpack("<dd", bytes.fromhex(node["hex"]))),
    "bytes": lambda node, tensors: base64.b64decode(node["base64"]),
    "bytearray": lambda node, tensors: bytearray(base64.b64decode(node["base64"])),
    "torch.dtype": lambda node, tensors: _dtype(node["name"]),
    "torch.device": lambda node, tensors: torch.device(node["name"]),
    "path": lambda node, tensors: pathlib.Path(node["text"]),
    "datetime": lambda node, tensors: datetime.datetime.fromisoformat(node["text"]),
    "date": lambda node, tensors: datetime.date.fromisoformat(node["text"]),
    "time": lambda node, tensors: datetime.time.fromisoformat(node["text"]),
    "timedelta": lambda node, tensors: datetime.timedelta(*node["items"]),
    "Decimal": lambda node, tensors: decimal.Decimal(node["text"]),
    "UUID": lambda node, tensors: uuid.UUID(node["text"]),
    "range": lambda node, tensors: range(*node["items"]),
    "Namespace": lambda node, tensors: _namespace(argparse.Namespace, node),
    "SimpleNamespace": lambda node, tensors: _namespace(types.SimpleNamespace, node),
    "numbers": lambda node, tensors: tensors[node["name"]].tolist(),
    "long bytes": lambda node, tensors: tensors[node["name"]].numpy().tobytes(),
    "tensor": _tensor,
    "numpy": _array,
    "numpy.scalar": lambda node, tensors: _scalar(node),
}


# --- values without a plain form


def _spell(path: tuple[Any, ...]) -> str:
    """Format a path as Python code: " at decay.schedule[3]['a key']", or "" for the root."""
    text = ""
    for part in path:
        plain = isinstance(part, str) and part.isidentifier()
        text += f".{part}" if plain else f"[{_shorten(repr(part))}]"
    return f" at {text.removeprefix('.')}" if text else ""


def _refusal(value: Any, *, hashed: bool = False) -> tuple[str, str]:
    """Describe a value without a plain form, and the remedy.

    Args:
        hashed: the value is a dict key or a set member.
    """
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor):
        return _tensor_refusal(value, name, hashed)
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return "a function", "Use the numbers and names it is made from, and create it again after loading."
    if isinstance(value, type):
        return f"a class ({value.__qualname__})", "Use its name, and look the class up after loading."
    if isinstance(value, enum.Enum):
        return f"an enum member ({value})", "Use its .value."
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"a namedtuple ({name})", "Use tuple(value) or value._asdict()."
    if isinstance(value, (pathlib.PurePath, datetime.date, datetime.time)):
        return f"a {name}", f"Use {'str(value)' if isinstance(value, pathlib.PurePath) else 'value.isoformat()'}."
    if isinstance(value, torch.Generator):
        return "a torch.Generator", "Use its get_state(), and set_state() after loading."
    if kind is np.ndarray:
        return f"a numpy array of dtype {value.dtype}", "Use its tolist(), or one array per field."
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return f"a {name}, a mapping,", "Use dict(value)."
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        return f"a dataclass ({name})", "Use dataclasses.asdict(value)."
    if callable(getattr(value, "state_dict", None)):
        return f"a {name}", "Use its state_dict(), and load that into a new object."
    for base in (dict, list, tuple, set, str, int, float):
        if isinstance(value, base):
            return f"a {name}, a subclass of {base.__name__},", f"Use {base.__name__}(value)."
    return (
        f"a {name}",
        "Use its parts: None, bools, numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts "
        "of these.",
    )


def _tensor_refusal(value: Tensor, name: str, hashed: bool) -> tuple[str, str]:
    if hashed:
        return "a tensor as a dict key or set member", "Use its name, its index or its item() as the key."
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        if hasattr(value, "full_tensor"):
            return f"a {name}, one process's shard of a tensor,", "Use its full_tensor()."
        return f"a {name}, a subclass of Tensor,", "Use value.as_subclass(Tensor), or the tensors inside it."
    if value.is_meta:
        return "a tensor on the meta device, which has no values,", "Give it values first (to_empty, then initialise)."
    if value.is_quantized:
        return "a quantized tensor", "Use its int_repr(), q_scale() and q_zero_point(), or its dequantize()."
    return (
        f"a tensor of layout {value.layout}",
        "Use its to_dense(), or its indices and values as separate tensors.",
    )


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except ValueError:  # the message contains an int of more than 4,300 digits, which Python refuses to print
        return type(error).__name__


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
