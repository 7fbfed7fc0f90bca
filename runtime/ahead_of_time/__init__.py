"""Which kernels a deployment will launch, and compiling them before it does.

Stands on families/, calls/, codegen/, kernels/, selection/ and upstream/.
"""
