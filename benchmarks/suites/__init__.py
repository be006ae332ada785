"""Benchmarks that a person runs, and the worker extensions they load into engines."""
