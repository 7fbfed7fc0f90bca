"""A call: checked, planned, launched, recorded or traced.

Stands on codegen/, kernels/, selection/ and upstream/.
"""
