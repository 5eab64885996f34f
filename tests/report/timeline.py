"""Check of the events of a trace, by the trace event format."""

import json
from collections import defaultdict

METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}


def check(trace):
    """Check a trace as it is on disk; return its slices: {(process, thread): [event, ...]}.

    Every event has the fields of its phase, times do not go backward, and slices of a thread are nested or disjoint.
    """
    trace = json.loads(json.dumps(trace, allow_nan=False))
    slices, names, last = defaultdict(list), set(), 0.0
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
            names.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= last
        assert event["dur"] >= 0
        last = event["ts"]
        slices[event["pid"], event["tid"]].append(event)
    for (process, thread), found in slices.items():
        assert ("process_name", process, 0) in names
        assert ("thread_name", process, thread) in names
        open_until = []
        for event in found:
            begin, end = nanoseconds(event["ts"]), nanoseconds(event["ts"] + event["dur"])
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)
    return slices


def nanoseconds(microseconds):
    return round(1e3 * microseconds)
