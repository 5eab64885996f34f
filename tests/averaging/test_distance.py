"""Distances between networks."""

import numpy as np
import pytest

from hvdx.averaging import compare
from hvdx.averaging import distance as distance_module
from hvdx.averaging.distance import distances, table
from hvdx.averaging.safetensors import save
from tests.averaging.arrays import Arrays


@pytest.fixture
def networks():
    rng = np.random.default_rng(0)
    return [
        Arrays(f"{i}.arrays", w=rng.normal(size=(30, 7)).astype("f4"), b=rng.normal(size=5), n=np.array([i]))
        for i in range(3)
    ]


def test_distances_are_norms_of_differences(networks, monkeypatch):
    monkeypatch.setattr(distance_module, "_BLOCK", 11)
    rows = distances(networks)
    assert [row.name for row in rows] == ["w", "b", "n", "all"]
    arrays = [n.tensors["w"].array().astype("f8") for n in networks]
    norm = np.mean([np.linalg.norm(a) for a in arrays])
    assert rows[0].norm == pytest.approx(norm)
    assert rows[0].shape == (30, 7)
    for (a, b), found in rows[0].pairs.items():
        assert found == pytest.approx(np.linalg.norm(arrays[a] - arrays[b]) / norm)


def test_all_is_the_floating_point_tensors_together(networks):
    flat = [np.concatenate([n.tensors[t].array().astype("f8").ravel() for t in "wb"]) for n in networks]
    norm = np.mean([np.linalg.norm(f) for f in flat])
    found = distances(networks)[-1]
    assert found.norm == pytest.approx(norm)
    assert found.pairs[1, 2] == pytest.approx(np.linalg.norm(flat[1] - flat[2]) / norm)


def test_distance_of_identical_networks_is_zero_even_if_they_are_zero():
    zero = [Arrays(w=np.zeros(3), e=np.zeros((0, 2)), b=np.array([True])) for _ in range(2)]
    assert [row.pairs[0, 1] for row in distances(zero)] == [0, 0, 0, 0]


def test_complex_numbers_count_with_both_parts():
    rows = distances([Arrays(w=np.array([3 + 4j])), Arrays(w=np.array([0j]))])
    assert rows[0].norm == pytest.approx(2.5)
    assert rows[0].pairs[0, 1] == pytest.approx(2.0)


@pytest.mark.filterwarnings("error")
def test_infinity_and_nan_are_shown_without_a_warning():
    rows = distances(
        [Arrays(w=np.array([np.inf]), v=np.array([np.nan], "f2")), Arrays(w=np.ones(1), v=np.ones(1, "f2"))]
    )
    assert np.isinf(rows[0].norm)
    assert np.isnan(rows[1].norm)
    assert "nan" in table(rows, ["a", "b"])


def test_progress_counts_every_byte(networks):
    counts = []
    distances(networks, counts.append)
    assert sum(counts) == sum(t.nbytes for n in networks for t in n.tensors.values())


def test_table_of_a_few_has_every_pair(networks):
    text = table(distances(networks), ["x/a.pt", "b.pt", "c.pt"])
    assert text.splitlines()[:3] == ["A  x/a.pt", "B  b.pt", "C  c.pt"]
    assert "A-B" in text
    assert "B-C" in text
    assert "30x7" in text


def test_table_of_many_has_the_closest_and_the_farthest():
    many = [Arrays(w=np.array([float(i * i)])) for i in range(30)]
    lines = table(distances(many), [f"{i}.pt" for i in range(30)]).splitlines()
    assert lines[26].split() == ["AA", "26.pt"]
    row = next(line for line in lines if line.startswith("w "))
    assert "A-B" in row
    assert "A-AD" in row
    assert max(map(len, lines)) <= 120


def test_compare_reads_files(tmp_path):
    for name, value in (("a", 1.0), ("b", 3.0)):
        save(tmp_path / f"{name}.safetensors", {"w": np.array([value])})
    rows = compare([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert rows[0].pairs == {(0, 1): 1.0}
