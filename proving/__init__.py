"""Proofs that take minutes to hours: `python -m proving WHAT`. Most write a table and its summary on a page.

Stands on benchmarks/, calls/, codegen/, families/, jax/, kernels/, parallel/, patching/, reference/, selection/, tools/
and upstream/.
"""
