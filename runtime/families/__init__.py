"""The families of norms: public functions, the formula of each, and what its calls have of their own.

Stands on calls/, kernels/, selection/, codegen/ and upstream/.
"""
