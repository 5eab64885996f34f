"""The seam to Keras and TensorFlow: their private names, looks into a caller's frame, and replaced methods.

No other file of `hvdx.keras` has any; `tests/test_seams.py` reads the syntax trees. When a new version moves a name,
mend it here: `tests/keras/test_seams.py` names the function whose "Relies on" no longer holds. `make matrix` runs that
test on the oldest and the newest versions.

Rooms that may not import this one have seams of their own: `averaging/recalibrate.py` calls `Layer._flatten_layers` and
replaces `call` of layers; `comm/failure.py` and `comm/progress.py` look into frames, those of threads and not of Keras.
"""
