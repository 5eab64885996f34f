"""The site file of `hvdx job`: path, settings, and errors."""

import re
import tomllib
from pathlib import Path

import pytest

from hvdx.cli.batch import site
from hvdx.cli.main import main
from hvdx.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the site file, and returns an environment with its path."""

    def put(text):
        (tmp_path / "site.toml").write_text(text)
        return {"HVDX_SITE": str(tmp_path / "site.toml")}

    return put


def test_location_follows_the_environment():
    assert site.location({"HVDX_SITE": "/a/b.toml", "XDG_CONFIG_HOME": "/c"}) == Path("/a/b.toml")
    assert site.location({"XDG_CONFIG_HOME": "/c"}) == Path("/c/hvdx/site.toml")
    for environ in ({}, {"HVDX_SITE": "", "XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "not/absolute"}):
        assert site.location(environ) == Path.home() / ".config/hvdx/site.toml"


def test_missing_file_gives_no_settings(tmp_path):
    assert site.settings("slurm", {"XDG_CONFIG_HOME": str(tmp_path)}) == {}


def test_file_of_the_variable_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"expected to read .*nothing\.toml.*Do: hvdx job site"):
        site.settings("slurm", {"HVDX_SITE": str(tmp_path / "nothing.toml")})


def test_table_of_the_system_wins(write):
    environ = write('account = "all"\nenv_setup = "one line"\n[slurm]\naccount = "mine"\n[pbs]\nqueue = "q"\n')
    assert site.settings("slurm", environ) == {"account": "mine", "env_setup": ["one line"]}
    assert site.settings("pbs", environ) == {"account": "all", "env_setup": ["one line"], "queue": "q"}
    # Systems without a queue have no account.
    assert site.settings("mpirun", environ) == {"env_setup": ["one line"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('acount = "x"', "did you mean account"),
        ('[slurm]\npartitoin = "x"', r"\[slurm\] partitoin: .*did you mean partition"),
        ('[slrum]\npartition = "x"', r"\[slrum\]: .*did you mean slurm"),
        ('partition = "x"', r"partition belongs under \[slurm\]"),
        ('[slurm]\nqueue = "x"', r"queue belongs under \[pbs\] or \[lsf\]"),
        ("zzzzz = 1", "hvdx job site"),
        ("account = 1", "account: expected a text"),
        ('signal = "300"', "signal: expected a whole number"),
        ("signal = true", "signal: expected a whole number"),
        ("env_setup = [1]", "env_setup: expected lines"),
        ("account = ", "expected TOML"),
        ("account = " + "[" * 5000, "expected TOML"),
    ],
)
def test_mistakes_are_errors(text, message, write):
    with pytest.raises(ConfigError, match=message) as raised:
        site.settings("lsf", write(text))
    assert "Do: " in str(raised.value)
    assert "site.toml" in str(raised.value)


def test_example_has_every_key_and_is_valid(write):
    text = site.example()
    assert tomllib.loads(text) == {}
    bare = "\n".join(re.sub("^# ", "", line) for line in text.splitlines() if re.match(r"# (\w+ = |\[)", line))
    for system, keys in site.TABLES.items():
        assert set(site.settings(system, write(bare))) == set(keys), system


def test_site_prints_and_changes_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "site.toml"
    monkeypatch.setenv("HVDX_SITE", str(path))
    assert main(["job", "site"]) == 0
    text = capsys.readouterr().out
    assert f"{path}, which does not exist yet" in text.splitlines()[0]
    assert not path.exists()
    path.write_text('account = "mine"\n')
    assert main(["job", "site"]) == 0
    assert "which exists" in capsys.readouterr().out
    assert path.read_text() == 'account = "mine"\n'
