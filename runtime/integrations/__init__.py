"""Plugs: norms of inference and training engines served by kernels, through the interfaces those have for it.

Stands on families/, calls/, selection/ and upstream/.
"""
