"""Errors of every kernel against fp64, beside those of torch."""
