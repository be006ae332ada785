"""Everything is declared in pyproject.toml; compiled extensions, once there are any, go here."""

from setuptools import setup

setup()
