"""What models are made of: differentiable functions, modules, and `patch`.

Stands on calls/, selection/, codegen/ and compiled/.
"""
