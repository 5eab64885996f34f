"""Data sets of the jobs: Fashion-MNIST from a folder, scikit-learn's digits, and the sources of Python's library."""

import gzip
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Folders of the package dataset-fashion-mnist of Debian and Ubuntu, and of Keras' own download.
_FOLDERS = (
    Path("/usr/share/datasets/fashion-mnist"),
    Path(os.path.expanduser(os.environ.get("KERAS_HOME", "~/.keras"))) / "datasets" / "fashion-mnist",
)
_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
# Smallest number of Python files; one file of _HELD_OUT is held out from training.
_FEWEST, _HELD_OUT = 50, 10

#: Number of codes of `encode`: 95 printable ASCII characters, the end of a line, and one for all others.
VOCABULARY = 97
_NEWLINE, _OTHER = 95, 96


@dataclass(frozen=True)
class Data:
    """Images and their classes.

    Attributes:
        name: name of the data set.
        train_x, test_x: images, float32[n, height, width, 1] from 0 to 1.
        train_y, test_y: classes, int64[n] from 0 to 9.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load(name: str, folder: str | None = None) -> Data:
    """Load a data set.

    Args:
        name: "digits" or "fashion-mnist".
        folder: folder of Fashion-MNIST's four .gz files; by default those of Debian and Keras are searched.

    Raises:
        FileNotFoundError: if Fashion-MNIST is missing; the message says how to get it.
        ValueError: if a file is no IDX file, or is cut short.

    Example:
        >>> load("digits").train_x.shape
        (1437, 8, 8, 1)
    """
    return _digits() if name == "digits" else _fashion_mnist(folder)


def _digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(f"digits: {error}. The data come with scikit-learn: pip install '.[jobs]'") from None

    bundle = load_digits()
    order = np.random.default_rng(0).permutation(len(bundle.target))
    x = (bundle.images[order] / 16.0).astype(np.float32)[..., None]
    y = bundle.target[order].astype(np.int64)
    cut = len(y) * 4 // 5
    return Data("digits", x[:cut], y[:cut], x[cut:], y[cut:])


def _fashion_mnist(folder: str | None) -> Data:
    candidates = [Path(folder).expanduser()] if folder else list(_FOLDERS)
    for candidate in candidates:
        if all((candidate / file).exists() for pair in _FILES.values() for file in pair):
            train_x, train_y, test_x, test_y = (
                _read_idx(candidate / file) for split in ("train", "test") for file in _FILES[split]
            )
            return Data(
                "fashion-mnist",
                (train_x / np.float32(255))[..., None],
                train_y.astype(np.int64),
                (test_x / np.float32(255))[..., None],
                test_y.astype(np.int64),
            )
    raise FileNotFoundError(
        f"Fashion-MNIST: expected {_FILES['train'][0]} and its three companions in "
        f"{' or '.join(map(str, candidates))}. Install it (apt install dataset-fashion-mnist), give its folder with "
        "--folder, or use --data digits."
    )


def _read_idx(path: Path) -> np.ndarray:
    """Read an IDX file: two zero bytes, a type (8 = uint8), the number of dimensions, their extents, the data."""
    with gzip.open(path, "rb") as file:
        raw = file.read()
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path}: expected an IDX file of bytes, got one that begins with {raw[:4]!r}.")
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).astype(int))
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if data.size != np.prod(shape):
        raise ValueError(f"{path}: expected {np.prod(shape)} bytes of data, got {data.size}. The file is cut short.")
    return data.reshape(shape)


@dataclass(frozen=True)
class Text:
    """Source files as one text for training and one for validation.

    Attributes:
        files, held_out_files: number of files in each text.
        train, held_out: codes of the characters, uint8[n]; `encode` defines them.
    """

    files: int
    held_out_files: int
    train: np.ndarray
    held_out: np.ndarray


def encode(text: str) -> np.ndarray:
    """Return the codes of characters, uint8[len(text)].

    Example:
        >>> encode("A b\\n\\té").tolist()
        [33, 0, 66, 95, 96, 96]
    """
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    printable = (points >= ord(" ")) & (points <= ord("~"))
    codes = np.where(points == ord("\n"), _NEWLINE, np.where(printable, points - ord(" "), _OTHER))
    return codes.astype(np.uint8)


def load_text(folder: str | None = None, characters: int | None = None) -> Text:
    """Load Python sources. Every tenth file, in the order of their names, is held out from training.

    Args:
        folder: folder of at least 50 files `*.py`; by default the modules of Python's standard library, but not those
            in its packages.
        characters: length to which the training text is cut.

    Raises:
        FileNotFoundError: if there are fewer files.

    Example:
        >>> text = load_text(characters=1000)
        >>> len(text.train), text.files > text.held_out_files > 0
        (1000, True)
    """
    where = Path(folder).expanduser() if folder else Path(sysconfig.get_paths()["stdlib"])
    # A distribution adds files of its own to this folder, and each build a file of its options.
    found = [file for file in where.glob("*.py") if folder or file.stem in sys.stdlib_module_names]
    if len(found) < _FEWEST:
        raise FileNotFoundError(
            f"text: expected at least {_FEWEST} Python files in {where}, got {len(found)}. Install the whole standard "
            "library (apt install libpython3-stdlib), or give a folder of Python files with --folder."
        )
    # The order of the names must not depend on the locale or the file system.
    sources = [file.read_text("utf-8", "replace") for file in sorted(found, key=lambda file: file.name)]
    held_out = sources[_HELD_OUT - 1 :: _HELD_OUT]
    train = [source for i, source in enumerate(sources, 1) if i % _HELD_OUT]
    return Text(len(train), len(held_out), encode("\n".join(train))[:characters], encode("\n".join(held_out)))
