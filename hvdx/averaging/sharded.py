"""Hugging Face checkpoints: a folder with the weights in one file or in shards, an index, and configuration."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from hvdx.averaging.network import Network, Values
from hvdx.averaging.pytorch import PyTorch
from hvdx.averaging.safetensors import Safetensors
from hvdx.errors import AverageError

#: How the name of an index of shards ends.
INDEX_ENDING = ".index.json"
# By what the index is called, and the file where there is only one; safetensors are loaded where there are both.
_USUAL = ("model.safetensors", "pytorch_model.bin")
_MOST_INDEX = 100_000_000
# Weights in other formats, and states of trainers: they are not those of the mean.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", INDEX_ENDING)


class Sharded(Network):
    """A folder as `model.save_pretrained` makes it, by its name or by that of its index.

    The result is a folder in shards like the first network's; others may be in shards of other sizes. What else is in
    the folder, such as configuration and tokenizer, is the first network's, except for weights in other formats and
    folders, which are left out.

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
        """Each tensor has to be where the index says, and nowhere else."""
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
        """By the index, or the usual name of the only file."""
        if path.is_dir():
            return any((path / name).is_file() for name in _candidates())
        return path.name.endswith(INDEX_ENDING) and path.is_file()

    @classmethod
    def open(cls, path: Path) -> Network:
        """See `Network.open`."""
        return cls(path)

    def write(self, out: Path, values: Values) -> None:
        """See `Network.write`."""
        out.mkdir()
        for beside in sorted(self._folder.iterdir()):
            if beside.is_file() and not beside.name.endswith(_WEIGHTS):
                shutil.copyfile(beside, out / beside.name)
        if self._index.name not in self._shards:
            shutil.copyfile(self._index, out / self._index.name)
        for name, shard in self._shards.items():
            shard.write(out / name, values)

    def close(self) -> None:
        """Let go of the files."""
        for shard in self._shards.values():
            shard.close()


def _candidates() -> list[str]:
    return [name for usual in _USUAL for name in (f"{usual}{INDEX_ENDING}", usual)]


def _index_of(folder: Path) -> Path:
    return next(folder / name for name in _candidates() if (folder / name).is_file())


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        if index.stat().st_size > _MOST_INDEX:
            raise ValueError(f"more than {_MOST_INDEX} bytes")
        places = json.loads(index.read_bytes())["weight_map"]
        # A path would lead out of the folder, when it is written too.
        if not places or not all(isinstance(name, str) and Path(name).name == name for name in places.values()):
            raise ValueError("a weight_map whose values are no names of files")
        return dict(places)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        raise AverageError(
            f"{index}: expected an index with a weight_map, got something else ({error}). Copy or save it again."
        ) from None


def _joined(architectures: list[Any]) -> Any:
    """Merge the shards' architectures, so that networks cut into other shards compare as equal."""
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
