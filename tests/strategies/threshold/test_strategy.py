# Tests: hvdx/strategies/step.py, hvdx/strategies/threshold/options.py, hvdx/strategies/threshold/routes.py

import gc
import weakref

import numpy as np
import pytest

from hvdx.costs.sizes import message_bytes
from hvdx.errors import ConfigError, HvdxError, ReplicaError
from hvdx.strategies import StepInput, TensorSpec, Threshold, parse
from hvdx.strategies.threshold.density import INITIAL_DENSITY
from hvdx.strategies.threshold.options import START, parse_warmup
from tests.strategies.virtual import ELEMENTS, SHAPES, SPECS, on_all, on_hosts

OPTIONS = {
    "fixed tau": {"tau": 0.01},
    "density": {"target_density": 0.05},
    "auto": {},
    "plain indices": {"target_density": 0.05, "index_coding": "none"},
    "gradient": {"target_density": 0.05, "placement": "gradient"},
    "no lookahead": {"target_density": 0.05, "lookahead": 0},
    "falling": {"target_density": 0.05, "warmup": "density:6"},
    "sharded": {"target_density": 0.05, "exchange": "sharded"},
    "sharded, auto": {"exchange": "sharded"},
    "sharded, fixed tau": {"tau": 0.01, "exchange": "sharded"},
    "sharded, plain indices": {"tau": 0.01, "exchange": "sharded", "index_coding": "none"},
}


def update(rank, step):
    random = np.random.default_rng([rank, step])
    return [np.asarray(random.normal(size=shape) * 0.01, np.float32) for shape in SHAPES]


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def steps_of(strategy, steps, update=update, finite=lambda rank, step: True):
    """Return a function that takes steps on one rank; it returns the result of each step, and the exchange."""

    def run(comm):
        exchange = strategy.open(comm, SPECS)
        got = [flat(exchange.step(update(comm.rank, t), finite(comm.rank, t))).copy() for t in range(steps)]
        return got, exchange

    return run


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_all_ranks_get_the_same_bits(name, size):
    everyone = on_all(size, steps_of(Threshold(**OPTIONS[name]), 12))
    first = [step.tobytes() for step in everyone[0][0]]
    assert any(np.frombuffer(step, np.float32).any() for step in first)
    for got, _ in everyone[1:]:
        assert [step.tobytes() for step in got] == first


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_updates_and_residuals_keep_their_sum(name, size):
    """Applied updates and residuals add up to the sum of all updates."""
    everyone = on_all(size, steps_of(Threshold(**OPTIONS[name]), 12))
    applied = np.sum(everyone[0][0], axis=0, dtype=np.float64) * size
    residuals = np.sum([flat(exchange.residuals) for _, exchange in everyone], axis=0, dtype=np.float64)
    wanted = np.sum([flat(update(r, t)) for r in range(size) for t in range(12)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + residuals, wanted, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"exchange": "sharded"}, {"local": "dense"}], ids=str)
def test_what_is_unsent_is_the_residual_in_the_order_of_the_tensors(options):
    """Of one step by each rank, what its own messages hold; the owners of shards hold back what others sent."""

    def run(comm):
        exchange = Threshold(target_density=0.1, second_moments="own", warmup="none", **options).open(comm, SPECS)
        exchange.step(update(comm.rank, 0) if comm.rank in (0, 2) else zeros)
        assert [array.shape for array in exchange.unsent()] == list(SHAPES)
        owned = flat(exchange.residuals) - flat(exchange.unsent()) if options.get("exchange") else 0.0
        return exchange.unsent_share, flat(exchange.unsent()), owned, flat(exchange.step(zeros))

    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    found = on_hosts(["one", "one", "other", "other"], run)
    assert [share for share, *_ in found] == [0.25] * 4
    before = 0.25 * flat(update(0, 0)) + 0.25 * flat(update(2, 0))
    waiting = 0.25 * sum(unsent + owned for _, unsent, owned, _ in found)
    # A tenth of the elements, the largest, was sent in the step before.
    sent = before - waiting
    assert 0.5 < np.dot(sent, before) / np.dot(sent, sent) < 2
    assert 0.02 < np.count_nonzero(np.abs(sent) > 1e-6) / ELEMENTS < 0.3


def densities(strategy, steps, divides, state=None):
    """Return the density that the codec aims at in each step, and the exchange of rank 0."""

    def run(comm):
        exchange = strategy.open(comm, SPECS)
        if state is not None:
            exchange.load_state_dict(state)
        found = []
        for t in range(steps):
            sample = [np.ones(4, np.float32)] * len(SPECS) if divides else None
            exchange.take(StepInput(update(comm.rank, t), sample=sample))
            found.append(exchange.encoder.codec.target_density)
        return found, exchange

    return on_all(2, run)[0]


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
@pytest.mark.parametrize("divides", [False, True])
def test_density_falls_at_the_start_of_a_training(exchange, divides):
    for options, wanted in (
        ({"target_density": 0.01}, [parse_warmup("density:200").density(step, 0.01) for step in range(4)]),
        ({"target_density": 0.01, "warmup": "none"}, [0.01] * 4),
        ({"tau": 0.01}, [None] * 4),
    ):
        assert densities(Threshold(exchange=exchange, **options), 4, divides)[0] == wanted


def test_warm_up_of_an_automatic_density_starts_at_an_eighth_and_resumes():
    assert densities(Threshold(overhead=10.0, warmup="none"), 1, divides=True)[0] == [INITIAL_DENSITY]
    automatic = Threshold(overhead=10.0)
    found, exchange = densities(automatic, 3, divides=True)
    assert found[0] == START
    assert densities(automatic, 1, True, exchange.state_dict())[0] == [float(exchange.encoder.arrays()["density"])]
    fixed = Threshold(target_density=0.01)
    _, exchange = densities(fixed, 3, divides=True)
    wanted = parse_warmup("density:200").density(3, 0.01)
    assert densities(fixed, 1, True, exchange.state_dict())[0] == [wanted]


def test_a_starved_exchange_is_said_once(capfd):
    """After the first update no element moves, so that no message has entries."""

    def still(rank, step):
        return update(rank, step) if step == 0 else [np.zeros(shape, np.float32) for shape in SHAPES]

    everyone = on_all(2, steps_of(Threshold(tau=1.0), 40, still))
    assert [exchange.telemetry.full()["starved_steps"] for _, exchange in everyone] == [32.0, 32.0]
    printed = capfd.readouterr().err
    assert printed.count("the exchange is starved: in the last 16 steps rank 0 sent 0 % of the elements") == 1
    assert "Lower tau, or give a target_density." in printed
    on_all(2, steps_of(Threshold(target_density=0.05), 40))
    on_all(1, steps_of(Threshold(tau=1.0), 40, still))
    assert "starved" not in capfd.readouterr().err


def test_lookahead_follows_its_formula():
    """Compare with a codec to whose residual u + lookahead * (u - previous u) is added."""
    from hvdx import codec

    tau, lookahead = 0.02, 2.0
    (got, _), *_ = on_all(1, steps_of(Threshold(tau=tau, lookahead=lookahead), 6))
    plain = codec.Threshold(tau=tau)
    state, before = plain.init([ELEMENTS]), np.zeros(ELEMENTS, np.float32)
    for t in range(6):
        u = flat(update(0, t))
        message, state = plain.encode([u + np.float32(lookahead) * (u - before)], state)
        out = np.zeros(ELEMENTS, np.float32)
        plain.decode([message], [out])
        # Rounding may move an element across tau one step earlier or later.
        assert np.mean(np.abs(out - got[t]) > 1e-6) < 0.002
        before = u


def test_arrays_of_the_caller_are_free_after_a_step():
    def run(comm):
        exchange, arrays = Threshold(target_density=0.05).open(comm, SPECS), update(comm.rank, 0)
        exchange.step(arrays)
        refs = [weakref.ref(a) for a in arrays]
        del arrays
        gc.collect()
        return [ref() is None for ref in refs]

    assert on_all(2, run) == [[True] * len(SPECS)] * 2


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nan_on_one_rank_skips_only_that_step_on_all_ranks(size, exchange, capfd):
    bad = size - 1

    def gradients_held_nan(rank, step):
        return not (rank == bad and step == 3)

    strategy = Threshold(target_density=0.05, exchange=exchange)
    run = steps_of(strategy, 8, finite=gradients_held_nan)
    everyone = on_all(size, run)
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    assert not everyone[0][0][3].any()
    assert everyone[0][0][4].any()
    applied = np.sum(everyone[0][0], axis=0, dtype=np.float64) * size
    residuals = np.sum([flat(exchange.residuals) for _, exchange in everyone], axis=0, dtype=np.float64)
    # The skipped step is dropped on all ranks: otherwise a run of skipped steps would be added at once.
    taken = [t for t in range(8) if t != 3]
    wanted = np.sum([flat(update(r, t)) for r in range(size) for t in taken], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + residuals, wanted, atol=2e-6)
    printed = capfd.readouterr().err
    assert f"hvdx: step 4: NaN or infinity on rank {bad}; all ranks skipped the step" in printed


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
def test_update_that_holds_nan_is_dropped_and_named(exchange, capfd):
    def broken(rank, step):
        arrays = update(rank, step)
        if rank == 1 and step == 2:
            arrays[0][3, 4] = np.nan
        return arrays

    everyone = on_all(2, steps_of(Threshold(target_density=0.05, exchange=exchange), 5, broken))
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    assert all(np.isfinite(flat(exchange.residuals)).all() for _, exchange in everyone)
    assert everyone[0][0][3].any()
    printed = capfd.readouterr().err
    assert "rank 1, step 3: variable 0" in printed
    assert "element 94 is nan" in printed


def test_endless_nan_ends_the_training():
    run = steps_of(Threshold(tau=0.01), 200, finite=lambda rank, step: rank == 0)
    with pytest.raises(HvdxError, match=r"100 steps in a row were skipped.*rank 1"):
        on_all(2, run)


def test_updates_of_zeros_are_accepted():
    def nothing(rank, step):
        return [np.zeros_like(a) for a in update(rank, step)] if rank == 1 else update(rank, step)

    for options in ({"target_density": 0.05}, {}):
        everyone = on_all(2, steps_of(Threshold(**options), 6, nothing))
        assert everyone[0][0][-1].any()
        assert not flat(everyone[1][1].residuals).any()


@pytest.mark.parametrize("name", ["density", "fixed tau", "falling", "sharded"])
def test_restored_exchange_continues_bit_for_bit(name):
    straight, stopped = restarted(Threshold(**OPTIONS[name]))
    assert on_all(2, straight) == on_all(2, stopped)


def restarted(strategy):
    """Return two functions of a rank that return its last four of ten steps: in one exchange, and in a restored one."""

    def straight(comm):
        exchange = strategy.open(comm, SPECS)
        got = []
        for t in range(10):
            got.append(flat(exchange.step(update(comm.rank, t))).tobytes())
        return got[6:]

    def stopped(comm):
        first = strategy.open(comm, SPECS)
        for t in range(6):
            first.step(update(comm.rank, t))
        second = strategy.open(comm, SPECS)
        second.load_state_dict(first.state_dict())
        return [flat(second.step(update(comm.rank, t))).tobytes() for t in range(6, 10)]

    return straight, stopped


@pytest.mark.parametrize("size", [2.0**24, 2.0**28])
def test_restore_accepts_large_residuals_of_a_lookahead(size):
    """The lookahead is subtracted from the residual again, which may then be many times tau."""
    tau = 2.0**-20

    def save_and_restore(comm):
        first, second = (Threshold(tau=tau, lookahead=3).open(comm, SPECS) for _ in range(2))
        large = [np.full(shape, size * tau, np.float32) for shape in SHAPES]
        first.step(large)
        assert flat(first.residuals).min() < -2 * size * tau
        second.load_state_dict(first.state_dict())
        return [flat(exchange.step(large)).tobytes() for exchange in (first, second)]

    ((one, two),) = on_all(1, save_and_restore)
    assert one == two


def test_restore_refuses_the_state_of_another_model():
    (_, exchange), *_ = on_all(1, steps_of(Threshold(target_density=0.05), 2))
    saved = exchange.state_dict()
    with pytest.raises(ConfigError, match="expected a step"):
        exchange.load_state_dict({k: v for k, v in saved.items() if k != "step"})
    with pytest.raises(ConfigError, match="another model"):
        exchange.load_state_dict(saved | {"codec.residual": np.zeros(3, np.float32)})
    # A checkpoint in mid-epoch of a version with `overlap`.
    with pytest.raises(ConfigError, match="overlap=True, an option that was removed"):
        exchange.load_state_dict(saved | {"late": np.zeros(ELEMENTS, np.float32)})


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 2), (1, 3), (4, 1)])
def test_merged_residuals_keep_their_sum(before, after):
    strategy = Threshold(target_density=0.05)
    saved = [exchange.state_dict() for _, exchange in on_all(before, steps_of(strategy, 5))]

    def restored(comm):
        exchange = strategy.open(comm, SPECS)
        exchange.load_state_dict(strategy.merge(saved, comm.rank, comm.size))
        residuals = flat(exchange.residuals).astype(np.float64)
        exchange.step(update(comm.rank, 9))
        return residuals

    total = np.sum([s["codec.residual"] for s in saved], axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.sum(on_all(after, restored), axis=0), total, atol=1e-7)


def test_ranks_with_different_strategies_are_refused_on_all():
    def run(comm):
        with pytest.raises(ReplicaError, match=r"different strategies: Threshold\(tau=0.5\) on rank 0"):
            Threshold(tau=0.5 / (comm.rank + 1)).open(comm, SPECS)
        with pytest.raises(ReplicaError, match="different variables"):
            Threshold(tau=0.5).open(comm, [TensorSpec("v", (3 + comm.rank,), 4)])

    on_all(2, run)


def test_warning_of_a_tau_far_too_small_is_printed_once(capfd):
    specs = [TensorSpec("w", (5000,), 4)]

    def run(comm):
        exchange = Threshold(tau=1e-8, lookahead=0).open(comm, specs)
        for t in range(3):
            exchange.step([np.random.default_rng(t).normal(size=5000).astype(np.float32)])

    on_all(1, run)
    assert capfd.readouterr().err.count("tau=1e-08 is too small") == 1


def test_telemetry_counts_messages_and_headers():
    everyone = on_all(4, steps_of(Threshold(target_density=0.05), 10))
    costs = [exchange.telemetry for _, exchange in everyone]
    for cost in costs:
        others = sum(c.messages for c in costs) - cost.messages
        headers = 10 * 3 * 8 * 4
        assert cost.steps == 10
        assert cost.sent == 3 * cost.messages + headers
        assert cost.received == others + headers
        assert 0.01 < cost.entries / cost.encoded < 0.2
        assert 0 < cost.density < 0.3
        assert cost.tau > 0
        assert 0.1 < cost.residual < 1
        assert cost.bits > 3
    assert {"density", "tau", "MB_sent"} <= set(costs[0].live()) < set(costs[0].full())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tau": 0.1, "target_density": 0.1}, "both tau and target_density"),
        ({"target_density": "links"}, "'auto' or a share"),
        ({"target_density": 2.0}, "between 0 and 1"),
        ({"tau": -1.0}, "positive"),
        ({"second_moments": "shared"}, "'mean', 'own'"),
        ({"placement": "weights"}, "'update', 'gradient'"),
        ({"lookahead": -1}, "from 0 to 1000"),
        ({"lookahead": 1, "placement": "gradient"}, "updates only"),
        ({"overhead": 0}, "share of a step"),
        ({"warmup": "slowly"}, "'auto', 'none', or 'density'"),
        ({"warmup": "density:0"}, "'auto', 'none', or 'density'"),
        ({"warmup": "workers:20"}, "'workers' was removed"),
        ({"warmup": "density:10", "tau": 0.1}, "tau is fixed"),
        ({"index_coding": "golomb"}, "index_coding"),
        ({"threads": 0}, "threads"),
        ({"exchange": "ring"}, "'all_gather', 'sharded'"),
        ({"exchange": "sharded", "device": "cuda"}, "device='cpu'"),
    ],
)
def test_wrong_options_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        Threshold(**options)


def test_one_line_spelling():
    text = "threshold:target_density=0.03,warmup=density:50,placement=update"
    assert repr(parse(text)) == "Threshold(target_density=0.03, warmup='density:50')"
    assert repr(parse("threshold")) == "Threshold()"
    assert repr(parse("threshold:target_density=auto")) == "Threshold()"
    assert repr(parse("threshold:tau=0.001")) == "Threshold(tau=0.001)"


def test_bytes_sent_are_near_the_entropy():
    specs = [TensorSpec("w", (200_000,), 4)]
    strategy = Threshold(target_density=0.02, warmup="none")

    def run(comm):
        exchange = strategy.open(comm, specs)
        for t in range(30):
            exchange.step([np.random.default_rng([comm.rank, t]).normal(size=200_000).astype(np.float32)])
        return exchange.telemetry.sent / 30

    for sent in on_all(2, run):
        assert 0.7 < sent / message_bytes(200_000, 0.02) < 1.4
