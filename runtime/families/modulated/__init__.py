"""Norms that are scaled and shifted by sample: the row of the family, its functions."""
