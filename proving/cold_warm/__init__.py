"""Differential tests of caches: each call with the caches that a sequence of calls left, and with none.

`contexts` and `operands` say how calls can differ, `functions` and `modules` say what is called, `session` records
launches and drops caches, `outcome` observes a call, and `compare` draws sequences, compares and shrinks.
"""
