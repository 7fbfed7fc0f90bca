"""Norms times an activated gate: the row of the family, its functions and modules."""
