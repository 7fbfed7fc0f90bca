"""Differential tests of caches: each call with the caches that a sequence of calls left, and with none.

`properties` says how calls can differ, `operands` builds tensors of them, `functions` and `modules` say what is called,
`session` records launches and drops caches, `compare` draws sequences, compares and shrinks.
"""
