"""Run tests/ranks under mpirun on 2 and on 4 ranks. (On 1 rank pytest runs them directly.)"""

import re

import pytest

from tests.launch import run

# Seconds for the whole folder; they end a deadlock, unless Horovod's own limit ends it sooner.
LIMIT = {2: 1800, 4: 1800}
# Smallest number of tests that must run, by number of ranks.
LEAST = {2: 300, 4: 70}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_folder_passes_at(ranks, request):
    more = ["--all"] if request.config.getoption("--all") else []
    done = run(
        ranks, ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *more, "tests/ranks"], LIMIT[ranks]
    )
    passed = re.findall(r"(\d+) passed", done.out)
    print(done.out[-4000:])
    assert done.code == 0, f"exit status {done.code}"
    assert len(passed) == ranks
    assert len(set(passed)) == 1
    assert int(passed[0]) > LEAST[ranks]
