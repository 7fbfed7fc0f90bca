"""Passes over torch.compile's graphs, which join the operators with what stands beside them.

Stands on calls/, codegen/, selection/ and upstream/.
"""
