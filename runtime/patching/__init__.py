"""Swap the norms of a model for ours, and back: `normforge.patch`.

Stands on families/, calls/, selection/, upstream/, codegen/ and compiled/.
"""
