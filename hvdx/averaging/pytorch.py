"""PyTorch files of `torch.save` since version 1.6: a zip archive with a pickle and the tensors."""

import itertools
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdx.averaging.extents import OneFile, Output, splice
from hvdx.averaging.limits import check_description, check_name
from hvdx.averaging.network import Tensor, Values, small_float
from hvdx.averaging.torch_pickle import REMEDY, read_pickle, tensors_of
from hvdx.averaging.torch_values import View
from hvdx.errors import AverageError

_ZIP = b"PK\x03\x04"
# Files before version 1.6 begin with this pickled integer.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE = "data.pkl"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP64_EXTRA = 20
# Above this size `zipfile` reserves space for 64-bit sizes by itself, since compressed data may be larger.
_ZIP64_FROM = zipfile.ZIP64_LIMIT / 1.05
# Alignment of storages by torch.save, in bytes, so that they can be mapped into memory.
_ALIGNMENT = 64
_MOST_ALIGNMENT = 1 << 15
# The pickle of a hundred thousand tensors takes twenty megabytes.
_MOST_PICKLE = 1 << 26
_MOST_TEXT = 64
# Maximum number of entries per byte of the pickle; an entry of a shared list counts wherever the list occurs.
_MOST_SHARED = 10
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class _Placed:
    """Tensor in a storage; offset, shape and stride are in elements."""

    tensor: Tensor
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """Offset after the last element."""
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def contiguous(self) -> bool:
        """True if the elements lie one after another, in order."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    def within(self, storage: np.ndarray) -> np.ndarray:
        """Return the tensor as a view of its storage."""
        strides = [s * storage.itemsize for s in self.stride]
        return np.lib.stride_tricks.as_strided(storage[self.offset :], self.shape, strides)


class PyTorch(OneFile):
    """`.pt` or `.pth` file."""

    format = "PyTorch"
    suffixes = (".pt", ".pth")

    def _scan(self) -> None:
        self._entries = self._listed()
        self._root = self._root_of()
        self._expanded: dict[str, list[int]] = {}
        self._storages, self.tensors = self._parse()
        # Elements that two tensors share have one mean only if every file shares them.
        self.architecture = {
            "tensors that share elements": self._overlapping(),
            "shapes of expanded tensors": self._expanded,
        }
        self.normalises = any(name.endswith(_STATISTICS) for name in self.tensors)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Compare the name, the entries of the archive, or the first bytes of a file before version 1.6."""
        if path.name.endswith(cls.suffixes):
            return path.is_file()
        if head.startswith(_ZIP):
            try:
                with zipfile.ZipFile(path) as archive:
                    return any(name.endswith(f"/{_PICKLE}") for name in archive.namelist())
            except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
                return False
        return head.startswith(_LEGACY)

    def write(self, out: Path, values: Values) -> None:
        """Write a copy with new values; strides stay the same, and tensors that share a storage still do."""
        with Output(out) as file, zipfile.ZipFile(file, "w") as archive:
            for name, entry in self._entries.items():
                copy = zipfile.ZipInfo(name, entry.date_time)
                copy.file_size = entry.file_size
                large = entry.file_size > _ZIP64_FROM
                copy.extra = _padding(file.tell(), len(name.encode()), large, self._alignment)
                with archive.open(copy, "w", force_zip64=large) as target:
                    begin, placed = self._begin(entry), self._storages.get(name, [])
                    if _disjoint(placed):
                        at = {begin + p.offset * p.tensor.dtype.itemsize: p.tensor for p in placed}
                        splice(self._file, at, values, target.write, begin, begin + entry.file_size)
                    else:
                        target.write(self._rebuilt(entry, placed, values).data)

    def _listed(self) -> dict[str, zipfile.ZipInfo]:
        """Return the entries of the archive, in the order of the file."""
        head = self._file.read(0, min(self._file.size, len(_LEGACY)), "its beginning")
        if head == _LEGACY:
            raise AverageError(
                f"{self.path}: expected a file of PyTorch 1.6 or later, got the older format, which cannot be read "
                "without executing it. Load it and save it again with a later PyTorch."
            )
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError, struct.error) as error:
            raise AverageError(
                f"{self.path}: expected a zip archive as torch.save writes it, got none ({error}). It was cut short or "
                "is something else: copy or save it again."
            ) from None
        for info in infos:
            check_name(f"{self.path}", info.filename)
        self._check_disjoint(infos)
        entries = {info.filename: info for info in infos}
        if len(entries) < len(infos):
            raise AverageError(f"{self.path}: expected each entry of the archive once. It is damaged: save it again.")
        return entries

    def _check_disjoint(self, infos: list[zipfile.ZipInfo]) -> None:
        """Reject entries (in the order of the file) that share bytes: a small file could unpack to any size."""
        for info, after in itertools.zip_longest(infos, infos[1:]):
            following = after.header_offset if after else self._file.size
            end = self._begin(info) + info.compress_size
            if end > following:
                raise AverageError(
                    f"{self.path}: {info.filename}: expected an entry that ends by {following}, where the next entry "
                    f"begins or the file ends, got {end}. It is damaged: copy or save it again."
                )

    def _root_of(self) -> str:
        """Return the root folder of the archive, with a slash."""
        roots = [name.removesuffix(_PICKLE) for name in self._entries if name.endswith(f"/{_PICKLE}")]
        if len(roots) != 1:
            raise AverageError(f"{self.path}: expected an archive as torch.save writes it, got another. {REMEDY}")
        if f"{roots[0]}constants.pkl" in self._entries:
            raise AverageError(
                f"{self.path}: expected a state dictionary, got a TorchScript archive, which holds code. {REMEDY}"
            )
        for info in self._entries.values():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise AverageError(
                    f"{self.path}: {info.filename}: expected an entry that is neither compressed nor encrypted, as "
                    "torch.save writes it. Load it and save it again with PyTorch."
                )
        return roots[0]

    def _parse(self) -> tuple[dict[str, list[_Placed]], dict[str, Tensor]]:
        """Return the tensors of each storage, sorted by offset, and all tensors in the order of the file."""
        order = self._text("byteorder", "little")
        if order not in ("little", "big"):
            raise AverageError(f"{self.path}: byteorder: expected little or big, got {order!r}. It is damaged.")
        alignment = self._text(".storage_alignment", str(_ALIGNMENT))
        usable = alignment.isdecimal() and 1 <= int(alignment) <= _MOST_ALIGNMENT
        self._alignment = int(alignment) if usable else _ALIGNMENT
        entry, where = self._entries[f"{self._root}{_PICKLE}"], f"{self.path}: {_PICKLE}"
        check_description(where, entry.file_size, self._file.size - entry.file_size)
        nest = read_pickle(self._content(entry, _MOST_PICKLE), where)
        storages: dict[str, list[_Placed]] = {name: [] for name in self._entries}
        tensors = {}
        for name, view in tensors_of(nest, where, _MOST_SHARED * entry.file_size):
            if name in tensors:
                raise AverageError(f"{self.path}: {name}: two tensors have this name. Name them otherwise.")
            place = self._place(name, view, order)
            tensors[name] = place.tensor
            if place.tensor.size:
                storages[f"{self._root}data/{view.storage}"].append(place)
        for name, placed in storages.items():
            if len({p.tensor.dtype for p in placed}) > 1:
                raise AverageError(f"{self.path}: {name}: expected one dtype in a storage, got several. {REMEDY}")
            placed.sort(key=lambda p: p.offset)
        ordered = {p.tensor.name: p.tensor for placed in storages.values() for p in placed}
        return storages, ordered | {name: tensor for name, tensor in tensors.items() if not tensor.size}

    def _place(self, name: str, view: View, order: str) -> _Placed:
        if view.dtype.startswith(("bfloat", "float")):
            dtype = small_float(view.dtype, self.path)
        else:
            dtype = np.dtype(view.dtype)
        dtype = dtype.newbyteorder("<" if order == "little" else ">")
        entry = self._entries.get(f"{self._root}data/{view.storage}")
        nbytes = view.count * (1 if view.in_bytes else dtype.itemsize)
        if entry is None or entry.file_size != nbytes:
            found = "none" if entry is None else f"{entry.file_size}"
            raise AverageError(
                f"{self.path}: {name}: expected {nbytes} bytes in the entry data/{view.storage}, got {found}. It is "
                "damaged: copy or save it again."
            )
        begin = self._begin(entry)
        shape = _stored(view)
        empty = Tensor(name, shape, dtype, lambda start, out: None)
        place = _Placed(empty, view.offset, shape, view.stride)
        if not empty.size:
            return place
        if shape != view.shape:
            self._expanded[name] = list(view.shape)
        if place.end * dtype.itemsize > nbytes:
            raise AverageError(
                f"{self.path}: {name}: expected at most {nbytes // dtype.itemsize} elements, as its storage has, got a "
                f"tensor that ends at {place.end}. It is damaged: save it again."
            )
        if empty.size > nbytes // dtype.itemsize:
            raise AverageError(
                f"{self.path}: {name}: expected at most {nbytes // dtype.itemsize} elements, as its storage has, got "
                f"{empty.size}, which overlap. Save a copy: tensor.clone()."
            )
        if place.contiguous:
            tensor = self._file.tensor(name, shape, dtype, begin + view.offset * dtype.itemsize)
        else:
            # The whole storage has to lie within the file before it is mapped.
            self._file.tensor(name, (nbytes,), np.dtype("u1"), begin)
            tensor = self._scattered(place, begin, nbytes // dtype.itemsize)
        return _Placed(tensor, view.offset, shape, view.stride)

    def _scattered(self, place: _Placed, begin: int, count: int) -> Tensor:
        """Return a tensor whose elements are not in order. It is memory-mapped, since a block may span the storage."""
        dtype = place.tensor.dtype

        def read(start: int, out: np.ndarray) -> None:
            mapped = np.memmap(self.path, np.uint8, "r", begin, (count * dtype.itemsize,)).view(dtype)
            out[...] = place.within(mapped).flat[start : start + out.size]

        return Tensor(place.tensor.name, place.shape, dtype, read)

    def _rebuilt(self, entry: zipfile.ZipInfo, placed: list[_Placed], values: Values) -> np.ndarray:
        """Return the content of a storage with new values for its tensors."""
        dtype = placed[0].tensor.dtype
        storage = np.empty(entry.file_size, np.uint8)
        self._file.read_into(self._begin(entry), storage, entry.filename)
        # The size of a storage need not be a multiple of the element size.
        elements = storage[: storage.size // dtype.itemsize * dtype.itemsize].view(dtype)
        for place in _distinct(placed):
            view, at = place.within(elements), 0
            for block in values(place.tensor):
                view.flat[at : at + block.size] = block
                at += block.size
        return storage

    def _overlapping(self) -> list[list[str]]:
        """Return groups of names of tensors that overlap."""
        groups = []
        for placed in self._storages.values():
            group: list[_Placed] = []
            for place in placed:
                if group and place.offset >= max(p.end for p in group):
                    groups.append(group)
                    group = []
                group.append(place)
            groups.append(group)
        return sorted(sorted(p.tensor.name for p in group) for group in groups if len(group) > 1)

    def _begin(self, entry: zipfile.ZipInfo) -> int:
        """Return the offset of the content of an entry."""
        header = self._file.read(entry.header_offset, _LOCAL_HEADER.size, entry.filename)
        magic, name, extra = _LOCAL_HEADER.unpack(header)
        at = entry.header_offset + _LOCAL_HEADER.size
        # If the two names of an entry differ, some readers use one and some the other.
        if magic != _ZIP or not _is_called(entry, self._file.read(at, name, entry.filename)):
            raise AverageError(
                f"{self.path}: {entry.filename}: expected an entry of a zip archive with this name, got another. It is "
                "damaged: copy or save it again."
            )
        return at + name + extra

    def _content(self, entry: zipfile.ZipInfo, most: int) -> bytes:
        if entry.file_size > most:
            raise AverageError(
                f"{self.path}: {entry.filename}: expected at most {most} bytes, got {entry.file_size}. {REMEDY}"
            )
        return self._file.read(self._begin(entry), entry.file_size, entry.filename)

    def _text(self, name: str, default: str) -> str:
        entry = self._entries.get(f"{self._root}{name}")
        return self._content(entry, _MOST_TEXT).decode(errors="replace").strip() if entry else default


def _stored(view: View) -> tuple[int, ...]:
    """Return the shape without repetitions: a dimension with stride 0 stores one element."""
    if 0 in view.shape:
        return view.shape
    return tuple(1 if stride == 0 else extent for extent, stride in zip(view.shape, view.stride, strict=True))


def _is_called(entry: zipfile.ZipInfo, name: bytes) -> bool:
    return any(entry.orig_filename.encode(code, "replace") == name for code in ("utf-8", "cp437"))


def _distinct(placed: list[_Placed]) -> Iterator[_Placed]:
    """Yield tensors, except those with the same elements as an earlier one."""
    seen = set()
    for place in placed:
        key = (place.offset, place.shape, place.stride)
        if key not in seen:
            seen.add(key)
            yield place


def _disjoint(placed: list[_Placed]) -> bool:
    """Return whether all tensors are contiguous, and those with different elements do not overlap."""
    if not all(place.contiguous for place in placed):
        return False
    return all(a.end <= b.offset for a, b in itertools.pairwise(_distinct(placed)))


def _padding(at: int, name: int, large: bool, alignment: int) -> bytes:
    """Return an extra field, like that of torch.save, which aligns the content that follows it."""
    header = _LOCAL_HEADER.size + name + (_ZIP64_EXTRA if large else 0) + 4
    fill = -(at + header) % alignment
    return struct.pack("<2sH", b"FB", fill) + b"Z" * fill
