"""Kernels are compiled on all ranks, and rank 0 speaks for them."""

import gc

import pytest

from hvdx.comm.local import virtual_world
from hvdx.strategies.compiling import prepare_together
from tests.strategies.virtual import on_all


class Codec:
    """Codec whose kernels are missing on some ranks, and which cannot keep them."""

    compile_seconds = 30

    def __init__(self, prepared, why):
        self.prepared, self.why, self.calls = prepared, why, 0

    def prepare(self):
        self.calls += 1
        return self.why


def lines(capfd, missing, refused=()):
    def run(comm):
        codec = Codec(comm.rank not in missing, "no space" if comm.rank in refused else "")
        prepare_together(codec, comm, "Threshold")
        return codec.calls

    assert on_all(4, run) == [1] * 4
    return capfd.readouterr().err.splitlines()


def test_missing_kernels_are_announced_once(capfd):
    assert lines(capfd, missing=[]) == []
    (line,) = lines(capfd, missing=[1, 3])
    assert line.startswith("hvdx: compiling the kernels of Threshold on 2 of 4 ranks: about 30 s")


def test_first_rank_that_cannot_keep_its_kernels_is_named(capfd):
    (line,) = lines(capfd, missing=[], refused=[2, 3])
    assert line.startswith("hvdx: rank 2 cannot keep the compiled kernels")
    assert "no space" in line


class Visited(Codec):
    """Codec that counts the objects which a collection visits while its kernels are loaded."""

    def prepare(self):
        self.visited, self.frozen = len(gc.get_objects()), gc.get_freeze_count()
        if self.why:
            raise OSError(self.why)
        return ""


@pytest.fixture(params=[False, True])
def own(request):
    """True if the script has called `gc.freeze`."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    if request.param:
        gc.freeze()
    yield request.param
    gc.unfreeze()
    if before:
        gc.freeze()


def test_old_objects_are_no_garbage_while_kernels_are_loaded(own):
    before, frozen = len(gc.get_objects()), gc.get_freeze_count()
    for codec in (Visited(True, ""), Visited(True, "the disk has failed")):
        try:
            prepare_together(codec, virtual_world(1)[0], "Threshold")
        except OSError:
            assert codec.why
        assert own or codec.visited < before / 2 < codec.frozen
        assert not own or codec.frozen == frozen
        assert gc.get_freeze_count() == frozen
