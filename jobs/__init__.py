"""Example training jobs, installed as `hvdx.jobs`. Benchmarks are in benchmarks/."""
