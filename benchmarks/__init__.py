"""Times normforge and its peers on the machine that is there: `python -m benchmarks --help`.

Stands on ahead_of_time/, families/, calls/, codegen/, jax/, kernels/, selection/ and tools/.
"""
