"""The table of names in docs/horovod.md, compared with Horovod's modules and hvdx.keras."""

import importlib
import re
import types
from pathlib import Path

import pytest

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ConfigError, HorovodError
from hvdx.keras.horovod.api import REMEDIES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "horovod.md"
ROW = re.compile(r"^\| (`.+?`) \| (same|differs|raises) \| (.*)\|$", re.MULTILINE)
TABLE = [
    (name, status, how.strip())
    for names, status, how in ROW.findall(PAGE.read_text())
    for name in re.findall(r"`(\w+)`", names)
]


def names_of(module):
    """Yield the public names of a module, without imported modules of other packages."""
    for name, value in vars(importlib.import_module(module)).items():
        foreign = isinstance(value, types.ModuleType) and not value.__name__.startswith("horovod.")
        if not name.startswith("_") and not foreign:
            yield name


def test_table_lists_every_public_name_of_horovod_once():
    try:
        from hvdx.comm import horovod

        horovod.load()
    except HorovodError as error:
        pytest.skip(str(error))
    listed = [name for name, _, _ in TABLE]
    assert len(listed) == len(set(listed))
    # horovod.tensorflow.keras comes first: its import adds submodules to the names of horovod.tensorflow.
    assert set(listed) == {*names_of("horovod.tensorflow.keras"), *names_of("horovod.tensorflow")}


@pytest.mark.parametrize(("name", "status", "how"), TABLE, ids=[row[0] for row in TABLE])
def test_name_exists_or_raises_with_its_remedy(name, status, how):
    assert how or status == "same"
    if status != "raises":
        assert name in hvd.__all__
        assert hasattr(hvd, name)
        return
    with pytest.raises(ConfigError, match=name) as caught:
        getattr(hvd, name)(0)
    assert re.search(r"\b(Do: |Use )", str(caught.value))


def test_names_with_a_remedy_do_not_exist():
    assert not set(REMEDIES) & {*hvd.__all__, *(name for name, status, _ in TABLE if status != "raises")}


@pytest.mark.parametrize("module", [hvdx, hvd], ids=lambda m: m.__name__)
def test_run_of_horovod_raises_and_names_the_command(module):
    with pytest.raises(ConfigError, match="hvdx run -n"):
        module.run(print, np=2)
