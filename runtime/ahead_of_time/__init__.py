"""Which kernels a deployment will launch, and compiling them before it does.

Stands on calls/, codegen/, kernels/, selection/ and upstream/.
"""
