"""Holds the table of names in docs/horovod.md against Horovod's modules and hvdx.keras."""

import importlib
import re
import types
from pathlib import Path

import pytest

import hvdx.keras as hvd
from hvdx.errors import ConfigError, HorovodError
from hvdx.keras.horovod.names import REMEDIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "horovod.md"
ROW = re.compile(r"^\| (`.+?`) \| (same|differs|raises) \| (.*)\|$", re.MULTILINE)
TABLE = [
    (name, verdict, how.strip())
    for names, verdict, how in ROW.findall(PAGE.read_text())
    for name in re.findall(r"`(\w+)`", names)
]


def names_of(module):
    """Public names, without those of modules of others that it imports."""
    for name, value in vars(importlib.import_module(module)).items():
        foreign = isinstance(value, types.ModuleType) and not value.__name__.startswith("horovod.")
        if not name.startswith("_") and not foreign:
            yield name


def test_every_public_name_of_horovod_stands_in_the_table_once():
    try:
        from hvdx.comm import horovod

        horovod.load()
    except HorovodError as error:
        pytest.skip(str(error))
    listed = [name for name, _, _ in TABLE]
    assert len(listed) == len(set(listed))
    # The second first: it makes submodules names of the first.
    assert set(listed) == {*names_of("horovod.tensorflow.keras"), *names_of("horovod.tensorflow")}


@pytest.mark.parametrize(("name", "verdict", "how"), TABLE, ids=[row[0] for row in TABLE])
def test_name_is_there_or_raises_with_its_remedy(name, verdict, how):
    assert how or verdict == "same"
    if verdict != "raises":
        assert name in hvd.__all__
        assert hasattr(hvd, name)
        return
    with pytest.raises(ConfigError, match=name) as caught:
        getattr(hvd, name)(0)
    assert re.search(r"\b(Do: |Use )", str(caught.value))


def test_names_that_raise_are_not_there():
    assert not set(REMEDIES) & {*hvd.__all__, *(name for name, verdict, _ in TABLE if verdict != "raises")}
