"""What `fit` needs on several ranks: callbacks, data, metrics, replicas."""
