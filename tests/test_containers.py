"""The Dockerfile and Apptainer's definition describe one image; ranks train in it where `make container` built it."""

import os
import re
import shutil
import subprocess

import pytest

from tests.launch import ROOT

FOLDER = ROOT / "jobs" / "containers"
DOCKERFILE, DEFINITION = (FOLDER / "Dockerfile").read_text(), (FOLDER / "hvdx.def").read_text()
#: What only the Dockerfile installs: pods reach each other by ssh; a cluster's launcher starts Apptainer's containers.
FOR_PODS = {"openssh-client", "openssh-server"}


def found(pattern, text):
    """Return the one match of a pattern in the lines of a text."""
    (match,) = re.findall(pattern, text, re.MULTILINE)
    return match


def packages(text):
    """Return the packages of Debian that a text installs."""
    return set(found(r"apt-get install -y --no-install-recommends (.*?)(?: \\)?$", text).split())


def test_both_begin_with_one_base():
    assert found(r"^ARG BASE=(.*)$", DOCKERFILE) == found(r"^From: (.*)$", DEFINITION)


def test_both_install_the_same():
    assert packages(DOCKERFILE) - packages(DEFINITION) == FOR_PODS
    assert packages(DEFINITION) < packages(DOCKERFILE)
    assert found(r"^ARG EXTRAS=(.*)$", DOCKERFILE) == found(r"^ +EXTRAS=(.*)$", DEFINITION)
    installed = found(r'pip install --no-cache-dir "(.*)"$', DOCKERFILE)
    assert installed == found(r'pip install --no-cache-dir "(.*)"$', DEFINITION).replace("{{ EXTRAS }}", "${EXTRAS}")


def test_both_compile_the_kernels_in_an_environment_of_one_name():
    for text in (DOCKERFILE, DEFINITION):
        assert "python3 -m venv /opt/hvdx" in text
        assert "hvdx build-kernels" in text
        assert "PATH=/opt/hvdx/bin:" in text


def buildah(*words, **options):
    """Call buildah, which needs no container runtime to change the root folder."""
    env = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    return subprocess.run(["buildah", *words], check=False, capture_output=True, text=True, env=env, **options)


def test_two_ranks_train_in_the_image():
    if not shutil.which("buildah") or buildah("inspect", "--type=image", "localhost/hvdx").returncode:
        pytest.skip("expected the image localhost/hvdx of buildah, there is none; `make container` builds it")
    container = buildah("from", "localhost/hvdx").stdout.strip()
    try:
        command = ["hvdx", "run", "-n", "2", "python", "-m", "hvdx.jobs.linear_regression"]
        ended = buildah("run", container, "--", *command, timeout=300)
    finally:
        buildah("rm", container)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "400 examples on 2 workers" in ended.stdout
    assert "same parameters as one machine" in ended.stdout
