"""Hugging Face checkpoints: folders with the weights in one file or in shards, an index, and a configuration."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from hvdx import foreign
from hvdx.averaging.network import Network, Values
from hvdx.averaging.pytorch import PyTorch
from hvdx.averaging.safetensors import Safetensors
from hvdx.errors import AverageError

#: Ending of the name of an index of shards.
INDEX_ENDING = ".index.json"
# Names of a single file of weights; the index of shards adds its ending. The first is used if a folder has both.
_USUAL = ("model.safetensors", "pytorch_model.bin")
_MOST_INDEX = 100_000_000
# Weights in other formats and states of trainers, which do not belong to the mean.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", INDEX_ENDING)


class HuggingFace(Network):
    """Folder from `model.save_pretrained`, given by its path or by that of its index.

    The result has the shards of the first network; the shards of the others may differ. Other files in the folder, such
    as configuration and tokenizer, are copied from the first network. Subfolders and weights in other formats are left
    out.

    Source: the documentation of Hugging Face Transformers, "Sharded checkpoints".
    """

    format = "Hugging Face checkpoint"
    suffixes = ()

    def __init__(self, path: Path):
        self.path = path
        index = path if path.is_file() else _index_of(path)
        self._folder, self._index = index.parent, index
        self._shards: dict[str, Network] = {}
        places = _weight_map(index) if index.name.endswith(INDEX_ENDING) else None
        kind: type[Network] = PyTorch if index.name.removesuffix(INDEX_ENDING).endswith(".bin") else Safetensors
        try:
            for name in [index.name] if places is None else sorted(set(places.values())):
                self._shards[name] = kind.open(self._folder / name)
            if places is not None:
                self._check_places(places)
        except AverageError:
            self.close()
            raise
        self.tensors = {name: tensor for shard in self._shards.values() for name, tensor in shard.tensors.items()}
        self.normalises = any(shard.normalises for shard in self._shards.values())
        self.architecture = _joined([shard.architecture for shard in self._shards.values()])

    def _check_places(self, places: dict[str, str]) -> None:
        """Check that each tensor is in the file that the index names, and in no other."""
        found = [(tensor, name) for name, shard in self._shards.items() for tensor in shard.tensors]
        wrong = sorted(set(found) ^ set(places.items()))
        if wrong:
            tensor, _ = wrong[0]
            there = [name for name, shard in self._shards.items() if tensor in shard.tensors]
            raise AverageError(
                f"{self._index}: {tensor}: expected it in {places.get(tensor, 'no file')}, got it in "
                f"{', '.join(there) or 'none'}. Files of two networks are mixed: copy or save it again."
            )

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Look for an index, or for a single file with the usual name."""
        if path.is_dir():
            return any((path / name).is_file() for name in _candidates())
        return path.name.endswith(INDEX_ENDING) and path.is_file()

    @classmethod
    def open(cls, path: Path) -> Network:
        return cls(path)

    def write(self, out: Path, values: Values) -> None:
        out.mkdir()
        for file in sorted(self._folder.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, out / file.name)
        if self._index.name not in self._shards:
            shutil.copyfile(self._index, out / self._index.name)
        for name, shard in self._shards.items():
            shard.write(out / name, values)

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()


def _candidates() -> list[str]:
    return [name for usual in _USUAL for name in (f"{usual}{INDEX_ENDING}", usual)]


def _index_of(folder: Path) -> Path:
    return next(folder / name for name in _candidates() if (folder / name).is_file())


def _weight_map(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor."""
    try:
        places = json.loads(foreign.read(index, _MOST_INDEX))["weight_map"]
        # A path could lead out of the folder, also when the result is written.
        if not places or not all(isinstance(name, str) and Path(name).name == name for name in places.values()):
            raise ValueError("a weight_map with values that are not names of files")
        return dict(places)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        raise AverageError(
            f"{index}: expected an index with a weight_map, got something else ({error}). Copy or save it again."
        ) from None


def _joined(architectures: list[Any]) -> Any:
    """Merge the shards' architectures, so that networks with different shards compare as equal."""
    known = [architecture for architecture in architectures if architecture is not None]
    if not known:
        return None
    joined: dict[str, Any] = {}
    for key in known[0]:
        parts = [architecture[key] for architecture in known]
        if isinstance(parts[0], list):
            joined[key] = sorted(itertools.chain.from_iterable(parts))
        else:
            joined[key] = {name: value for part in parts for name, value in part.items()}
    return joined
