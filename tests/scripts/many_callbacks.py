"""Learning-rate schedule, early stopping, plateau, the best checkpoint, and a log: Keras' callbacks together."""

import tempfile

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

folder = tempfile.mkdtemp()
x = np.random.normal(size=(400, 10)).astype("float32")
y = x[:, :1] * x[:, 1:2] + 0.5 * np.random.normal(size=(400, 1)).astype("float32")
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse")
callbacks = [
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 3 else 0.9 * rate),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
    keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="val_loss", save_best_only=True),
    keras.callbacks.CSVLogger(f"{folder}/log.csv"),
    hvdx.keras.Distribute(),
]
model.fit(
    hvdx.shard((x[:320], y[:320]), global_batch_size=32),
    validation_data=hvdx.shard((x[320:], y[320:]), global_batch_size=40, shuffle=False, drop_remainder=False),
    epochs=12,
    shuffle=False,
    verbose=2,
    callbacks=callbacks,
)
if hvdx.rank() == 0:
    best = keras.models.load_model(f"{folder}/best.keras")
    assert all(np.array_equal(a, b) for a, b in zip(best.get_weights(), model.get_weights(), strict=True))
