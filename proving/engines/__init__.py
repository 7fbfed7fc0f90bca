"""Engines for inference, run with their own norms and with normforge's on one GPU."""
