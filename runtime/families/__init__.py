"""The families of norms: public functions, formulas, and for each family the row that the road of calls reads.

Stands on calls/, compiled/, kernels/, selection/, codegen/ and upstream/.
"""
