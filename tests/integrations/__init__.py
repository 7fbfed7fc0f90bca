"""Plugs in engines: each beside a stand-in of the engine's registry, and beside the engine where that is installed."""
