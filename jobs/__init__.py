"""Training jobs to run and to read first, and benchmarks; installed as `hvdx.jobs`."""
