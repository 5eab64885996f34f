"""Threshold(local="dense"): sums on hosts with several ranks, messages between hosts."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdx.errors import ConfigError, HvdxError, WireError
from hvdx.strategies import StepInput, TensorSpec, Threshold
from hvdx.strategies.threshold.hosts import HostsExchange
from hvdx.strategies.threshold.routes import adds_up
from tests.strategies.threshold.test_strategy import OPTIONS, flat, restarted, steps_of, update
from tests.strategies.virtual import ELEMENTS, SPECS, on_hosts

#: Layouts: the host of each rank.
LAYOUTS = {"2x2": "aabb", "3x2, in turns": "abcabc", "2x3": "aaabbb", "1x2": "aa"}


def dense(**options):
    return Threshold(local="dense", **options)


def total_residual(exchanges):
    return np.sum([flat(e.residuals) for e in exchanges], axis=0, dtype=np.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_get_the_same_bits_and_sums_are_kept(name, layout):
    hosts, strategy = LAYOUTS[layout], dense(**OPTIONS[name])
    everyone = on_hosts(hosts, steps_of(strategy, 12))
    assert isinstance(everyone[0][1], HostsExchange)
    first = [step.tobytes() for step in everyone[0][0]]
    assert any(np.frombuffer(step, np.float32).any() for step in first)
    for got, _ in everyone[1:]:
        assert [step.tobytes() for step in got] == first
    applied = np.sum(everyone[0][0], axis=0, dtype=np.float64) * len(hosts)
    wanted = np.sum([flat(update(r, t)) for r in range(len(hosts)) for t in range(12)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + total_residual([e for _, e in everyone]), wanted, atol=4e-6)


def test_pieces_keep_one_density():
    """An automatic density follows the same times on all ranks, although each rank measures its own."""

    def run(comm):
        exchange, seen = Threshold(overhead=0.01).open(comm, SPECS), []
        for t in range(60):
            exchange.step(update(comm.rank, t))
            seen.append(float(exchange.state_dict()["density"]))
        return seen

    everyone = on_hosts("aaabbb", run)
    assert len(set(everyone[0])) > 1
    assert everyone == [everyone[0]] * 6


@pytest.mark.parametrize("bad", [0, 3])
def test_nan_on_one_rank_skips_the_step_everywhere(bad, capfd):
    run = steps_of(dense(target_density=0.05), 8, finite=lambda rank, t: (rank, t) != (bad, 3))
    everyone = on_hosts("aabb", run)
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    assert not everyone[0][0][3].any()
    assert everyone[0][0][4].any()
    applied = np.sum(everyone[0][0], axis=0, dtype=np.float64) * 4
    wanted = np.sum([flat(update(r, t)) for r in range(4) for t in range(8) if t != 3], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + total_residual([e for _, e in everyone]), wanted, atol=4e-6)
    printed = capfd.readouterr().err
    assert printed.count(f"hvdx: step 4: NaN or infinity on rank {bad}; all ranks skipped the step") == 1
    assert printed.count("NaN") == 1


def test_update_that_holds_nan_names_its_rank_and_variable(capfd):
    def broken(rank, step):
        arrays = update(rank, step)
        if (rank, step) == (2, 2):
            arrays[3][4] = np.nan
            arrays[0][:, 1] = np.inf
        return arrays

    everyone = on_hosts("aabb", steps_of(dense(target_density=0.05), 5, broken))
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    assert np.isfinite(total_residual([e for _, e in everyone])).all()
    printed = capfd.readouterr().err
    assert printed.count("hvdx: rank 2, step 3: variable 0: NaN or infinity in the update") == 1
    assert "step 3: NaN or infinity on rank 2; all" in printed
    assert "rank 0" not in printed
    assert "rank 3" not in printed


def test_refused_update_is_taken_back_everywhere():
    """A fixed tau cannot express an update of more than 2**30 taus; the piece of one rank holds it."""

    def large(rank, step):
        arrays = update(rank, step)
        if (rank, step) == (1, 2):
            arrays[0][0, 0] = 1e9
        return arrays

    everyone = on_hosts("aabb", steps_of(dense(tau=0.01), 5, large))
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    applied = np.sum(everyone[0][0], axis=0, dtype=np.float64) * 4
    wanted = np.sum([flat(update(r, t)) for r in range(4) for t in range(5) if t != 2], axis=0, dtype=np.float64)
    left = applied + total_residual([e for _, e in everyone]) - wanted
    # A refusal rounds the residual of the piece.
    assert np.abs(np.delete(left, 0)).max() < 4e-6


def test_endless_nan_ends_the_training_on_all_ranks():
    def run(comm):
        with pytest.raises(HvdxError, match="100 steps in a row were skipped"):
            steps_of(dense(tau=0.01), 200, finite=lambda rank, step: rank == 0)(comm)

    on_hosts("aabb", run)


def test_auto_adds_up_on_equal_hosts():
    def opened(hosts, **options):
        return {type(e).__name__ for e in on_hosts(hosts, lambda comm: Threshold(tau=0.1, **options).open(comm, SPECS))}

    assert opened("aabb") == opened("abab") == opened("aa", local="dense") == {"HostsExchange"}
    for hosts in ("aab", "aa", "ab", "a"):
        assert opened(hosts) == {"MessageExchange"}
    assert opened("aabb", local="none") == opened("ab", local="dense") == {"MessageExchange"}


def test_fewer_elements_than_ranks_are_not_divided():
    specs = [TensorSpec("scalar", (), 4)]

    def run(comm):
        exchange = dense(tau=2.0**-10, lookahead=0).open(comm, specs)
        return float(exchange.step([np.array(comm.rank, np.float32)])[0])

    assert on_hosts("aabb", run) == [1.5] * 4


def test_devices_that_differ_are_agreed_on():
    """If one rank would encode on a GPU, all ranks send messages of their own."""
    options = Threshold().options
    kinds = on_hosts("aabb", lambda comm: adds_up(options, comm, 100, "cuda" if comm.rank == 3 else "cpu", 2))
    assert kinds == [False] * 4
    assert on_hosts("aabb", lambda comm: adds_up(options, comm, 100, "cpu", 2)) == [True] * 4


def test_unequal_hosts_are_refused_on_all_ranks():
    def run(comm):
        for refused in (lambda: dense().open(comm, SPECS), lambda: dense().check(comm)):
            with pytest.raises(ConfigError, match=r"same number of ranks on every host, got {'a': 2, 'b': 1}") as error:
                refused()
            assert error.value.collective
        Threshold().check(comm)

    on_hosts("aab", run)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="'auto', 'dense', 'none'"):
        Threshold(local="sparse")
    with pytest.raises(ConfigError, match="local='none'"):
        Threshold(local="dense", device="cuda")
    assert repr(dense(tau=0.1)) == "Threshold(tau=0.1, local='dense')"


def test_damaged_message_names_its_rank():
    def run(comm):
        exchange = dense(tau=0.001).open(comm, SPECS)
        exchange.step(update(comm.rank, 0))
        encoder = exchange.inner.encoder
        encode = encoder.encode
        encoder.encode = lambda *args: encode(*args)._replace(message=np.zeros(9 * (comm.rank == 3), np.uint8))
        with pytest.raises(WireError) as error:
            exchange.step(update(comm.rank, 1))
        return error.value.rank

    # Ranks 0 and 2 exchange empty messages, which are damaged too.
    assert on_hosts("aabb", run) == [0, 1, 0, 1]


def test_damaged_message_names_its_rank_among_all():
    """The ranks that hold the same parts of split layers are some of all ranks."""

    def run(comm):
        exchange = Threshold(tau=0.001).open(comm.divide(comm.rank % 2, comm.rank, "peers"), SPECS)
        encode = exchange.encoder.encode

        def cut(*args):
            encoded = encode(*args)
            return encoded._replace(message=encoded.message[: 20 if comm.rank > 1 else None])

        exchange.encoder.encode = cut
        with pytest.raises(WireError) as error:
            exchange.step(update(comm.rank, 1))
        return error.value.rank, str(error.value).count("rank")

    assert on_hosts("aaaa", run) == [(2, 1), (3, 1)] * 2


# -- second moments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", ["aabb", "aaaabbbb", "aa"])
@pytest.mark.parametrize(("noise", "power"), [(1.0, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("kind", ["all_gather", "sharded"])
def test_adam_is_corrected_for_the_noise_of_all_ranks(hosts, kind, noise, power):
    """With pure noise the factor is the root of the number of ranks, as without sums on hosts."""
    size = len(hosts)
    random = np.random.default_rng(2)
    samples = random.normal(size=(60, 1, 67)) * (1 - noise) + noise * random.normal(size=(60, size, 67))

    def run(comm, local):
        exchange = Threshold(tau=2.0**-16, lookahead=0, local=local, exchange=kind).open(comm, SPECS)
        for step in samples:
            sample = [step[comm.rank][:40], step[comm.rank][40:]]
            step_input = StepInput([np.full(s.shape, 0.25, np.float32) for s in SPECS], sample=sample)
            result = flat(exchange.take(step_input)).copy()
        return result, exchange.state_dict()["noise"]

    added, alone = (on_hosts(hosts, lambda comm, local=local: run(comm, local)) for local in ("dense", "none"))
    assert {result.tobytes() for result, _ in added} == {added[0][0].tobytes()}
    assert added[0][0] == pytest.approx(0.25 * size**power, rel=0.04)
    if (hosts, kind) == ("aa", "sharded"):
        return  # one host has no shards, so it takes a sample in every step
    # The means of a host are rounded to float16, and not the samples.
    for _, estimate in added:
        assert estimate == pytest.approx(alone[0][1], rel=2e-3, abs=2e-3)


# -- costs ------------------------------------------------------------------------------------------------------------


def test_bytes_between_hosts_are_counted_apart():
    specs = [TensorSpec("w", (60_000,), 4)]

    def run(comm, local):
        exchange = Threshold(target_density=0.02, local=local, warmup="none").open(comm, specs)
        for t in range(20):
            exchange.step([np.random.default_rng([comm.rank, t]).normal(size=60_000).astype(np.float32)])
        return exchange.telemetry

    added, alone = (on_hosts("aaaabbbb", lambda comm, local=local: run(comm, local)) for local in ("dense", "none"))
    for counts in added:
        assert counts.steps == 20
        assert counts.elements == 60_000
        assert counts.sent == counts.messages + 20 * 8 * 4
        # Three quarters of the update for the others, and the piece of the result, once for all of them.
        assert counts.inside == pytest.approx(20 * 4 * (45_000 + 15_000), rel=0.02)
        assert 0.01 < counts.entries / counts.encoded < 0.04
    across = sum(c.sent for c in alone) * 4 / 7
    assert sum(c.sent for c in added) / across < 0.3
    assert all(c.inside == 0 for c in alone)


def test_local_work_counts_as_exchanging(monkeypatch):
    """The cost that an automatic density follows includes the sums on the host, on the slowest rank."""
    seconds = 0.01
    add_up = HostsExchange._add_up

    def slow(self, tensors, out):
        pieces = add_up(self, tensors, out)
        if self._position == 1:
            time.sleep(seconds)
        return pieces

    monkeypatch.setattr(HostsExchange, "_add_up", slow)

    def run(comm):
        exchange = dense(tau=0.01).open(comm, SPECS)
        seen = []
        monkeypatch.setattr(exchange.inner.encoder, "observe_cost", lambda computing, costs: seen.append(max(costs)))
        for t in range(3):
            exchange.step(update(comm.rank, t))
        return exchange.telemetry.exchanging, seen[-1]

    found = on_hosts("aabb", run)
    assert all(cost > seconds for _, cost in found)
    assert all(found[rank][0] > 3 * seconds for rank in (1, 3))


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", ["aabb", "aaabbb"])
@pytest.mark.parametrize("name", ["density", "fixed tau", "falling", "sharded"])
def test_restored_exchange_continues_bit_for_bit(name, hosts):
    straight, stopped = restarted(dense(**OPTIONS[name]))
    assert on_hosts(hosts, straight) == on_hosts(hosts, stopped)


LAYOUT = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from(["dense", "none"]), st.sampled_from(["all_gather", "sharded"])
)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(before=LAYOUT, after=LAYOUT)
def test_residuals_keep_their_sum_on_other_hosts(before, after):
    """A state is restored on other hosts, with other ranks, and without sums on hosts."""

    def setting(layout):
        count, ranks, local, exchange = layout
        hosts = [f"host {host}" for host in range(count) for _ in range(ranks)]
        return hosts, Threshold(target_density=0.05, local=local, exchange=exchange)

    hosts, strategy = setting(before)
    exchanges = [exchange for _, exchange in on_hosts(hosts, steps_of(strategy, 4))]
    saved, total = [e.state_dict() for e in exchanges], total_residual(exchanges)
    hosts, strategy = setting(after)

    def restored(comm):
        exchange = strategy.open(comm, SPECS)
        same = comm.size == len(saved)
        exchange.load_state_dict(saved[comm.rank] if same else strategy.merge(saved, comm.rank, comm.size))
        residuals = flat(exchange.residuals).astype(np.float64)
        return residuals, [flat(exchange.step(update(comm.rank, t))).tobytes() for t in range(3)]

    everyone = on_hosts(hosts, restored)
    np.testing.assert_allclose(np.sum([r for r, _ in everyone], axis=0), total, atol=1e-6)
    assert all(steps == everyone[0][1] for _, steps in everyone)


def test_tau_and_density_are_restored_on_other_hosts():
    """A residual is not sent at once because tau starts again."""
    specs = [TensorSpec("w", (9000,), 4)]

    def gradient(rank, t):
        return [np.random.default_rng([rank, t]).normal(size=9000).astype(np.float32)]

    def train(comm):
        exchange = dense(target_density=0.02, warmup="none").open(comm, specs)
        for t in range(30):
            exchange.step(gradient(comm.rank, t))
        return exchange.state_dict()

    saved = on_hosts("aabb", train)

    def resume(comm):
        exchange = dense(target_density=0.02, warmup="none").open(comm, specs)
        exchange.load_state_dict(Threshold().merge(saved, comm.rank, comm.size))
        exchange.step(gradient(comm.rank, 30))
        return exchange.telemetry.density

    for density in on_hosts("aaabbb", resume):
        assert density < 0.09


def test_states_that_do_not_fit_are_refused_on_the_whole_host():
    def run(comm):
        exchange = dense(target_density=0.05).open(comm, SPECS)
        state = exchange.state_dict()
        if comm.rank == 2:
            state["codec.residual"] = np.zeros(3, np.float32)
        if comm.rank < 2:
            exchange.load_state_dict(state)
            return ""
        with pytest.raises(ConfigError) as error:
            exchange.load_state_dict(state)
        return str(error.value)

    *fine, wrong, other = on_hosts("aabb", run)
    assert fine == ["", ""]
    assert "expected the shape (1208,), got (3,)" in wrong
    assert "rank 2 of this host cannot restore" in other


def test_tensors_are_added_to_the_residual_of_the_host():
    def run(comm):
        exchange = dense(tau=1.0).open(comm, SPECS)
        exchange.step([np.zeros(s.shape, np.float32) for s in SPECS])
        exchange.add_to_residual(update(comm.rank, 0))
        held = flat(exchange.residuals)
        exchange.add_to_residual([-r for r in exchange.residuals])
        return held, flat(exchange.residuals)

    everyone = on_hosts("aabb", run)
    wanted = np.sum([flat(update(r, 0)) for r in range(4)], axis=0)
    np.testing.assert_allclose(np.sum([held for held, _ in everyone], axis=0), wanted, atol=1e-7)
    # Each element is held by one rank of each host.
    holders = sum((held != 0).astype(int) for held, _ in everyone)
    assert Counter(holders.tolist()).most_common(1)[0] == (2, ELEMENTS)
    assert not any(left.any() for _, left in everyone)
