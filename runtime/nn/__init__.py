"""What models are made of: differentiable functions and modules.

Stands on calls/, selection/, codegen/ and compiled/.
"""
