"""Passes over torch.compile's graphs, which join the operators with what stands beside them.

Stands on families/, calls/, selection/ and upstream/.
"""
