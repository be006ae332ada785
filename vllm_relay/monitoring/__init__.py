"""Counters of an engine's workers in the ``/metrics`` of the servers in front of it."""
