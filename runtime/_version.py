"""The version, in the one place that states it; packaging reads it without importing the package."""

__version__ = "0.2.0"
