"""Support for `fit` on several ranks: callbacks, data, metrics, replicas."""
