"""A stand-in for ssh, for tests of hosts."""

from hvdx.cli.common import reachable


def ssh(script, folder, monkeypatch):
    """Let a script in a folder be ssh, and the way to all hosts."""
    (folder / "ssh").write_text(script)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in reachable._OTHER_WAYS:
        monkeypatch.delenv(name, raising=False)
