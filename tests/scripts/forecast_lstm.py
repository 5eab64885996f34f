"""Forecast of a time series by an LSTM, from windows of timeseries_dataset_from_array."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

time = np.arange(1100)
series = np.stack([np.sin(time / 9), np.cos(time / 23) + 0.1 * np.random.normal(size=1100)], axis=1).astype("float32")
windows = keras.utils.timeseries_dataset_from_array(
    series[:-1], targets=series[24:, 0], sequence_length=24, batch_size=None, shuffle=False
)
model = keras.Sequential([keras.Input((24, 2)), keras.layers.LSTM(24), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.fit(hvdx.shard(windows, global_batch_size=64), epochs=4, verbose=2, callbacks=[hvdx.keras.Distribute()])
