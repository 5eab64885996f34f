"""Training jobs to run and to read first; installed as `hvdx.jobs`. Benchmarks are in benchmarks/."""
