"""Plugs: norms of inference and training engines served by kernels, through the interfaces those have for it.

Stands on parallel/, families/, calls/, selection/ and upstream/.
"""
