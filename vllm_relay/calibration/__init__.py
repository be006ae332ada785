"""Measures the cost model's constants inside a running CPU engine."""
