"""Replays a trace of requests: what they share and what relay is predicted to save."""
