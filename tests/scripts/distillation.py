"""Knowledge distillation: a small student learns from the outputs of a trained teacher."""

import keras
from keras import layers, ops
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

x, y = load_digits(return_X_y=True)
data = hvdx.shard(((x / 16).astype("float32"), y), global_batch_size=64)
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Distiller(keras.Model):
    def __init__(self, student, teacher, temperature=3.0):
        super().__init__()
        self.student, self.teacher, self.temperature = student, teacher, temperature
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        soft = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        distance = keras.losses.kl_divergence(soft, ops.softmax(y_pred / self.temperature, axis=1))
        return 0.1 * crossentropy(y, y_pred) + 0.9 * ops.mean(distance) * self.temperature**2


teacher = keras.Sequential([keras.Input((64,)), layers.Dense(96, activation="relu"), layers.Dense(10)])
teacher.compile("adam", crossentropy, metrics=["accuracy"])
teacher.fit(data, epochs=2, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])

student = keras.Sequential([keras.Input((64,)), layers.Dense(12, activation="relu"), layers.Dense(10)])
model = Distiller(student, teacher)
model.compile(keras.optimizers.Adam(1e-2), metrics=["accuracy"])
model.fit(data, epochs=3, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])
