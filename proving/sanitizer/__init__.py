"""Runs of every kernel under compute-sanitizer's tools."""
