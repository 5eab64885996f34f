"""Entry point for tools that read no pyproject.toml; all settings are there."""

from setuptools import setup

setup()
