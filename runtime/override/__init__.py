"""Kernels under the names of torch's own operators, for a whole process.

Stands on families/, calls/, kernels/, selection/, codegen/ and upstream/.
"""
