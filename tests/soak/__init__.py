"""Long tests, run by parts and resumed: ``python -m tests.soak``."""
