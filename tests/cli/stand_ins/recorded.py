"""Stand-in for a script with Distribute: writes the record of one worker, without TensorFlow.

recorded.py write MILLISECONDS PARAMETERS [BATCHES]   a record of the steps that HVDX_LIMIT asks for, and the
                                            number of batches in an epoch
recorded.py fail                            ends with an error
recorded.py hang                            does not end
recorded.py nothing                         ends without a record
"""

import os
import sys
import time

from hvdx.report.lines import COLUMNS, SCHEMA, Writer


def main(what, *more):
    if what == "fail":
        raise ValueError("no data here")
    if what == "hang":
        time.sleep(60)
    if what != "write":
        return
    seconds, parameters = float(more[0]) / 1000, int(more[1])
    kind, _, steps = os.environ["HVDX_LIMIT"].partition(":")
    assert kind == "steps"
    assert "HVDX_STRATEGY" not in os.environ
    writer = Writer(os.environ["HVDX_RECORD"], 0)
    dense = {"name": "dense", "class": "Dense", "parameters": parameters, "inputs": parameters // 1000, "outputs": 1000}
    model = {"name": "mlp", "parameters": parameters, "tensors": [[parameters // 2], [parameters // 2]]}
    model["layers"] = [dense, {"name": "flatten", "class": "Flatten"}]
    optimizer = {"name": "SGD", "momentum": 0.9, "slots": 1}
    batches = int(more[2]) if len(more) > 2 else None
    writer.write("fit", schema=SCHEMA, rank=0, size=1, batch=64, steps=batches, model=model, optimizer=optimizer)
    columns = {name: [0.0] * int(steps) for name in COLUMNS}
    columns["step"] = list(range(1, int(steps) + 1))
    # The first step compiles, and an exchange takes a tenth of each.
    columns["seconds"] = [5.0] + [1.1 * seconds] * (int(steps) - 1)
    columns["exchanging"] = [0.1 * seconds] * int(steps)
    writer.write("steps", **columns)
    writer.write("end", time=6.0, steps=int(steps), reason="limit", memory=5e8, counters={})


if __name__ == "__main__":
    main(*sys.argv[1:])
