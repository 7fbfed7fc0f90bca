"""GroupNorm: the row of the family, its functions and modules."""
