"""The road that every call takes: looked up, checked, planned, launched, recorded or traced.

Stands on codegen/, kernels/, selection/ and upstream/.
"""
