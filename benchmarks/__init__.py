"""Times normforge and its peers on the machine that is there: `python -m benchmarks --help`.

Stands on codegen/, families/, kernels/ and tools/.
"""
