"""Keras 3 archives: zip files with the configuration, the weights as HDF5, and other entries such as assets."""

import json
import shutil
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from hvdx.averaging.extents import File
from hvdx.averaging.hdf5 import Content
from hvdx.averaging.keras_config import MOST_BYTES, parse_config
from hvdx.averaging.limits import check_name, check_unpacked
from hvdx.averaging.network import Network, Values
from hvdx.errors import AverageError

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, struct.error, NotImplementedError, RuntimeError)


class KerasArchive(Network):
    """`.keras` file, with the optimiser state if it was saved.

    The configuration and the assets are copied from the first network.

    Source: the documentation of `keras.saving.save_model`, Keras 3.
    """

    format = "Keras"
    suffixes = (".keras",)

    def __init__(self, path: Path):
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except _DAMAGE as error:
            raise AverageError(
                f"{path}: expected a zip archive, as .keras files are, got one that is damaged or was cut short "
                f"({error}). Copy or save it again."
            ) from None
        try:
            size = path.stat().st_size
            for entry in self._archive.infolist():
                check_name(f"{path}", entry.filename)
            check_unpacked(f"{path}", sum(entry.file_size for entry in self._archive.infolist()), size)
            config, self.architecture = self._config()
            self._content = self._weights()
        except BaseException:
            self._archive.close()
            raise
        self.tensors = self._content.tensors
        if isinstance(self.architecture, dict):
            # Assets, such as vocabularies, change the output of the network.
            self.architecture["assets"] = {
                entry.filename: f"{entry.file_size} bytes with CRC {entry.CRC:08x}"
                for entry in self._archive.infolist()
                if entry.filename.startswith("assets/") and not entry.is_dir()
            }
        self.normalises = self._content.normalises or "BatchNormalization" in json.dumps(config)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Compare the name, or the entries of the archive."""
        if not path.is_file() or path.suffix in cls.suffixes:
            return path.is_file()
        if not head.startswith(b"PK\x03\x04"):
            return False
        try:
            with zipfile.ZipFile(path) as archive:
                return {_CONFIG, _WEIGHTS} <= set(archive.namelist())
        except _DAMAGE:
            return False

    @classmethod
    def open(cls, path: Path) -> Network:
        return cls(path)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._archive.getinfo(name)
        except KeyError:
            there = ", ".join(self._archive.namelist()[:5]) or "nothing"
            raise AverageError(
                f"{self.path}: {name}: is missing in this archive, which has {there}. Save the model again with "
                'Keras 3: model.save("name.keras").'
            ) from None

    def _config(self) -> tuple[Any, Any]:
        """Return the configuration of the model, and the part of it that is compared."""
        try:
            with self._archive.open(self._entry(_CONFIG)) as entry:
                text = entry.read(MOST_BYTES + 1)
        except _DAMAGE as error:
            raise AverageError(f"{self.path}: {_CONFIG}: it is damaged ({error}). Copy or save it again.") from None
        return parse_config(text, f"{self.path}: {_CONFIG}")

    def _weights(self) -> Content:
        entry = self._entry(_WEIGHTS)
        if entry.compress_type != zipfile.ZIP_STORED:
            return Content(self._unpacked(entry), what=_WEIGHTS)
        try:
            # Opening the entry checks that the name in its local header is the same.
            self._archive.open(entry).close()
        except _DAMAGE as error:
            raise AverageError(f"{self.path}: {_WEIGHTS}: it is damaged ({error}). Copy or save it again.") from None
        file = File(self.path)
        # The central directory gives the offset of the local header; only that header gives its own length.
        name, extra = struct.unpack("<HH", file.read(entry.header_offset + 26, 4, _WEIGHTS))
        begin = entry.header_offset + 30 + name + extra
        if file.crc32(begin, entry.file_size, _WEIGHTS) != entry.CRC:
            raise AverageError(
                f"{self.path}: {_WEIGHTS}: its checksum differs from the one in the archive: it is damaged. Copy or "
                "save it again."
            )
        return Content(file, begin, begin + entry.file_size, _WEIGHTS)

    def _unpacked(self, entry: zipfile.ZipInfo) -> File:
        """Return the weights of a compressed archive, unpacked."""
        with tempfile.NamedTemporaryFile(prefix="hvdx-", suffix=".h5") as unpacked:
            try:
                with self._archive.open(entry) as source:
                    shutil.copyfileobj(source, unpacked, 1 << 22)
                unpacked.flush()
            except _DAMAGE as error:
                raise AverageError(
                    f"{self.path}: {_WEIGHTS}: it cannot be unpacked ({error}). Copy or save the file again."
                ) from None
            file = File(Path(unpacked.name))
        # The open file outlives its name. Error messages name the path that the user gave.
        file.path = self.path
        return file

    def write(self, out: Path, values: Values) -> None:
        with zipfile.ZipFile(out, "x") as target:
            for entry in self._archive.infolist():
                fresh = zipfile.ZipInfo(entry.filename, entry.date_time)
                fresh.external_attr, fresh.file_size = entry.external_attr, entry.file_size
                if entry.filename == _WEIGHTS:
                    self._write_weights(out, target, fresh, values)
                else:
                    fresh.compress_type = entry.compress_type
                    self._copy(entry, target, fresh)

    def _copy(self, entry: zipfile.ZipInfo, target: zipfile.ZipFile, fresh: zipfile.ZipInfo) -> None:
        try:
            with self._archive.open(entry) as source, target.open(fresh, "w") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
        except _DAMAGE as error:
            if isinstance(error, OSError) and error.errno:  # of the file that is written
                raise
            raise AverageError(
                f"{self.path}: {entry.filename}: it is damaged ({error}). Copy or save it again."
            ) from None

    def _write_weights(self, out: Path, target: zipfile.ZipFile, entry: zipfile.ZipInfo, values: Values) -> None:
        if not self._content.scattered:
            with target.open(entry, "w") as sink:
                self._content.write_placed(values, sink.write)
            return
        # HDF5 chooses the place of compressed tensors, and the new file may be larger: it is written separately first.
        temporary = out.with_name(f"{out.name}.h5")
        self._content.write(temporary, values)
        entry.file_size = temporary.stat().st_size
        with temporary.open("rb") as source, target.open(entry, "w") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
        temporary.unlink()

    def close(self) -> None:
        self._content.close()
        self._archive.close()
