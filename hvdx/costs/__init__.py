"""Cost model: predictions of the seconds, bytes and memory of a training step, and the measurements they need."""
