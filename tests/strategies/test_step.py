"""The step around an encoder and a route, with stand-ins for both on one rank of several."""

import numpy as np
import pytest

from hvdx.comm import LocalComm
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.strategies import Encoder, Route, StepInput, TensorSpec
from hvdx.strategies.host_exchange import FINE, NOT_FINITE, REFUSED, Encoded
from hvdx.strategies.step import Arrived, MessageExchange

SPECS = [TensorSpec("a", (2,), 4), TensorSpec("b", (), 4)]
MESSAGE = np.arange(3, dtype=np.uint8)


class Ranks(LocalComm):
    """Rank 1 of 4, whose ranks have other numbers in the world."""

    rank, size, world_ranks = 1, 4, (5, 6, 7, 8)


class Notes(Encoder):
    """Encoder that notes its calls; NaN is refused."""

    def __init__(self):
        self.seen = []

    def encode(self, given, step):
        if any(np.isnan(t).any() for t in given.tensors):
            raise UpdateError("it is NaN", variable=1, element=0)
        self.seen.append("encode")
        return Encoded(MESSAGE, None, given.tensors, entries=2, density=0.5, tau=0.0)

    def silent(self, step):
        self.seen.append("silent")
        return Encoded(MESSAGE[:0], None)

    def roll_back(self, encoded):
        self.seen.append("roll back")

    def correction(self, ranks):
        return 0.5

    def observe_sample(self, sample):
        self.seen.append(f"sample {sample}")

    def observe_cost(self, computing, costs):
        self.seen.append((computing, costs))

    def read_residual(self):
        return np.zeros(3, np.float32)

    def write_residual(self, values):
        self.seen.append("write")

    def arrays(self):
        return {"residual": np.zeros(3)}

    def restore(self, state):
        self.seen.append("restore")


class Sums(Arrived):
    """Messages of which each element of the sum is 8; `bad` is a rank of the route whose message is damaged."""

    bad = None

    def add_to(self, out, scale, clear):
        if self.bad is not None:
            raise WireError("its checksum is wrong", rank=self.bad)
        assert clear
        for array in out:
            array[...] = 8 * scale


class Fixed(Route):
    """Route on which the other ranks have the given statuses."""

    def __init__(self, others=FINE, bad=None):
        self.others, self.bad, self.outgoing = others, bad, []

    def send(self, outgoing):
        self.outgoing.append(outgoing)
        statuses = np.full(4, self.others)
        statuses[1] = outgoing.status
        times = np.array([[4e9, 1e9]] * 3 + [[9e9, 2e9]], np.int64)
        kind = type("Arrived", (Sums,), {"bad": self.bad})
        return kind(statuses, times, 0.25, 0.5, 0.0, 0.0, 10, 20, "of all")


def exchange(encoder, route, **options):
    return MessageExchange(Ranks(), SPECS, encoder, route, **options)


def given(value=1.0, finite=True, sample=None):
    return StepInput([np.ones(2, np.float32), np.float32(value)], finite, sample=sample)


@pytest.mark.parametrize(("options", "ranks"), [({}, 4), ({"ranks_per_message": 2}, 8)])
def test_result_is_the_mean_over_the_ranks_times_the_correction(options, ranks):
    encoder, route = Notes(), Fixed()
    step = exchange(encoder, route, **options)
    result = step.combine(given(sample=[np.ones(2), np.zeros(1)]))
    assert [t.tolist() for t in result] == [[8 * 0.5 / ranks] * 2, 8 * 0.5 / ranks]
    assert encoder.seen == ["encode", "sample of all", (4.0, [1.0, 1.0, 1.0, 2.0])]
    assert route.outgoing[0].sample.tolist() == [1, 1, 0]
    counts = step.telemetry
    assert (counts.steps, counts.messages, counts.sent, counts.received, counts.waiting) == (1, 3, 10, 20, 0.25)
    assert (counts.entries, counts.encoded, counts.skipped, step.steps) == (2, 3, 0, 1)


@pytest.mark.parametrize(
    ("others", "value", "finite", "status", "seen"),
    [
        (NOT_FINITE, 1.0, True, FINE, ["encode", "roll back"]),
        (FINE, 1.0, False, NOT_FINITE, ["encode", "roll back"]),
        (FINE, np.nan, True, REFUSED, ["silent"]),
    ],
)
def test_step_is_skipped_on_all_ranks_if_one_is_not_fine(others, value, finite, status, seen, capfd):
    encoder, route = Notes(), Fixed(others)
    step = exchange(encoder, route)
    result = step.combine(given(value, finite))
    assert [t.tolist() for t in result] == [[0, 0], 0]
    assert route.outgoing[0].status == status
    assert [call for call in encoder.seen if isinstance(call, str)] == seen
    assert (step.telemetry.skipped, step.steps) == (1, 1)
    assert ("rank 6, step 1: b" in capfd.readouterr().err) == (status == REFUSED)


def test_damaged_message_is_that_of_a_rank_of_the_world():
    with pytest.raises(WireError) as caught:
        exchange(Notes(), Fixed(bad=3)).combine(given())
    assert caught.value.rank == 8


def test_cost_of_a_step_travels_with_the_next():
    route = Fixed()
    step = exchange(Notes(), route)
    step.combine(given())
    step.add_cost("exchanging", 100.0)
    step.combine(given())
    first, second = (one.times[1] / 1e9 for one in route.outgoing)
    assert first == 0.0
    assert 100.5 <= second < 101.0


@pytest.mark.parametrize(("state", "said"), [({}, "expected a step"), ({"step": 3, "late": 0}, "no result in flight")])
def test_state_without_steps_or_with_a_late_result_is_refused(state, said):
    encoder = Notes()
    step = exchange(encoder, Fixed())
    assert step.state_dict().keys() == {"step", "residual"}
    with pytest.raises(ConfigError, match=said):
        step.load_state_dict(state)
    assert encoder.seen == []
