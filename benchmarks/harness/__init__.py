"""Shared parts of the suites: engines, interleaved rounds, environment, result CSVs."""
