"""The names of `horovod.tensorflow` and `horovod.tensorflow.keras`."""
