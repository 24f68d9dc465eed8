"""Reads GGUF files: their metadata, and tensors in any quantization that the package `gguf` knows.

A GGUF file may come from anywhere, so every count and length is checked against a limit and the
size of the file before memory is allocated. The reader of the package `gguf` has no such checks.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eepo.types import UserError, printable

INSTALL = 'pip install "eepo[gguf]"'
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensor data, unless the file says otherwise
MAX_ALIGNMENT = 2**20
MAX_FIELDS = 10_000
MAX_TENSORS = 100_000
MAX_STRINGS = 4_000_000  # texts in one array; the largest vocabularies have 300,000 tokens
MAX_TEXT = 2**24  # bytes of one text, such as a chat template
MAX_DIMENSIONS = 4
MAX_PARTS = 1_000  # files of one model

# type in the file → format of `struct`; 8 is a text and 9 is an array
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class StoredTensor:
    """Says where a tensor is in a file. `shape` has the rows first, as in torch."""

    path: Path
    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / math.prod(self.shape)

    def load(self) -> Tensor:
        """Read the tensor and dequantize it to fp32."""
        import gguf

        stored = np.memmap(self.path, np.uint8, "r", self.offset, (self.num_bytes,))
        quantization = gguf.GGMLQuantizationType(self.type_id)
        bytes_per_row = self.num_bytes // math.prod(self.shape[:-1])
        try:
            values = gguf.dequantize(stored.reshape(-1, bytes_per_row), quantization)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor {self.name} has the type {quantization.name}, which the "
                "package gguf cannot dequantize"
            ) from error
        tensor = torch.tensor(values, dtype=torch.float32).reshape(self.shape)
        if not torch.isfinite(tensor).all():
            raise UserError(f"{self.path}: tensor {self.name} has values that are not finite")
        return tensor


@dataclass(frozen=True)
class GgufFile:
    """Holds the metadata and the list of tensors of a model, which may be split over several files.

    Arrays of numbers in `fields` are numpy arrays. Arrays of texts are lists.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def text(self, key: str, default: str = "") -> str:
        return self._value(key, str, "a text", default)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, bool, "true or false", default)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._value(key, int, "an integer", default)
        if not 0 < value < 2**31:
            raise self.error(f"{key} = {value} must be from 1 to {2**31 - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive float. A stored fp32 number such as 1e-6 is returned as 1e-6."""
        value = self._value(key, float, "a number", default)
        if not (math.isfinite(value) and value > 0):
            raise self.error(f"{key} = {value} must be positive and finite")
        return float(str(np.float32(value)))

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """Return a token id, or None if the file does not have it."""
        if key not in self.fields:
            return None
        token: int = self._value(key, int, "an integer", None)
        if not 0 <= token < num_tokens:
            raise self.error(f"{key} = {token} is not a token: the vocabulary has {num_tokens}")
        return token

    def error(self, message: str) -> UserError:
        return UserError(printable(f"{self.path}: {message}"))

    def _value(self, key: str, kind: type, description: str, default: Any) -> Any:
        value = self.fields.get(key, default)
        if value is None:
            raise self.error(f"the GGUF file has no {key}")
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number:
            raise self.error(f"{key} must be {description}, got {type(value).__name__}")
        return value


def check_package() -> None:
    """Raise an error if the optional package `gguf` is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"GGUF files need the package gguf: {INSTALL}")


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata of a file. For the first part of a split model, read all parts."""
    check_package()
    first = _read_header(path)
    num_parts = first.size("split.count", 1)
    if num_parts == 1:
        return first
    if num_parts > MAX_PARTS:
        raise first.error(f"split.count = {num_parts} must be at most {MAX_PARTS}")
    tensors = dict(first.tensors)
    for part_path in _other_parts(first, num_parts):
        part = _read_header(part_path)
        if part.size("split.count", 1) != num_parts or not part.tensors.keys().isdisjoint(tensors):
            raise part.error(f"this file is not a part of the same model as {path.name}")
        tensors |= part.tensors
    return GgufFile(path, first.fields, tensors)


def _other_parts(first: GgufFile, num_parts: int) -> list[Path]:
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != num_parts:
        raise first.error(
            f"a part of a model in {num_parts} files; give the first one, with a name such as "
            f"NAME-00001-of-{num_parts:05d}.gguf"
        )
    names = [f"{match[1]}-{part:05d}-of-{match[3]}.gguf" for part in range(2, num_parts + 1)]
    return [first.path.with_name(name) for name in names]


def _read_header(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise UserError(f"{path}: not a GGUF file: it has {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise UserError(f"{path} could not be read: {error.strerror or error}") from error


class _HeaderReader:
    """Reads the header of one file from left to right. No read goes past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.position, self.size = 0, len(data)

    def read(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise self._error("not a GGUF file: it does not start with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            big_endian = " (big-endian?)" if version % 2**16 == 0 else ""
            raise self._error(f"GGUF version {version}{big_endian}; supported: 2, 3")
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_fields = self._count("metadata fields", MAX_FIELDS)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._text()
            if key in fields:
                raise self._error(f"the metadata field {key[:80]!r} appears twice")
            fields[key] = self._value(self._number("I"), key)
        rows = [self._tensor_row() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment not in {2**power for power in range(21)}:
            raise self._error(
                f"general.alignment = {str(alignment)[:80]} must be a power of two up to "
                f"{MAX_ALIGNMENT}"
            )
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, type_id, shape, offset in rows:
            if name in tensors:
                raise self._error(f"the tensor {name[:80]!r} appears twice")
            tensors[name] = self._tensor(name, type_id, shape, start + offset)
        return GgufFile(self.path, fields, tensors)

    def _tensor_row(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name[:80]!r} has {num_dimensions} dimensions")
        # GGUF lists the fastest dimension first.
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, self._number("I"), shape, self._number("Q")

    def _tensor(self, name: str, type_id: int, shape: tuple[int, ...], offset: int) -> StoredTensor:
        import gguf

        try:
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
        except (ValueError, KeyError) as error:
            raise self._error(f"tensor {name[:80]!r} has the unknown type {type_id}") from error
        if not math.prod(shape) or shape[-1] % block_size:
            raise self._error(
                f"tensor {name[:80]!r} has the shape {list(shape)}, which is not made of blocks "
                f"of {block_size}"
            )
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > self.size:
            raise self._error(
                f"the GGUF file is truncated: tensor {name[:80]!r} ends at byte "
                f"{offset + num_bytes}, the file at {self.size}"
            )
        return StoredTensor(self.path, name, type_id, shape, offset, num_bytes)

    def _value(self, type_id: int, key: str) -> Any:
        if type_id == _TEXT:
            return self._text()
        if type_id == _ARRAY:
            return self._array(key)
        if type_id not in _NUMBERS:
            raise self._error(f"the metadata field {key[:80]!r} has the unknown type {type_id}")
        return self._number(_NUMBERS[type_id])

    def _array(self, key: str) -> Any:
        type_id, count = self._number("I"), self._number("Q")
        if type_id == _TEXT:
            if count > MAX_STRINGS:
                raise self._error(f"{key[:80]!r} has {count} texts; at most {MAX_STRINGS} are read")
            return [self._text() for _ in range(count)]
        if type_id not in _NUMBERS:
            raise self._error(f"{key[:80]!r} is an array of the unsupported type {type_id}")
        dtype = np.dtype("<" + _NUMBERS[type_id] if type_id != 7 else "?")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number("Q")
        if count > limit:
            raise self._error(f"the GGUF file claims {count} {what}; at most {limit} are read")
        return count

    def _text(self) -> str:
        length = self._number("Q")
        if length > MAX_TEXT:
            raise self._error(
                f"a text of {length} bytes at byte {self.position}; at most {MAX_TEXT} are read"
            )
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"a text before byte {self.position} is not UTF-8") from error

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.position:
            raise self._error(
                f"the GGUF file is truncated: its header needs {num_bytes} bytes at byte "
                f"{self.position}, but the file has {self.size}"
            )
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def _error(self, message: str) -> UserError:
        return UserError(printable(f"{self.path}: {message}"))
