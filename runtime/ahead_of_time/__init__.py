"""The kernels that a deployment will launch, compiled before the first launch.

Stands on families/, calls/, codegen/, kernels/, selection/ and upstream/.
"""
