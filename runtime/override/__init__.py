"""Kernels under the names of torch's own operators, for a whole process.

Stands on calls/, kernels/, codegen/ and upstream/.
"""
