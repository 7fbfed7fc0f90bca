"""What models are made of: differentiable functions and modules.

Stands on families/, calls/, selection/, codegen/, compiled/ and upstream/.
"""
