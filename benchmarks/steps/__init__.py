"""From the form of Triton's tutorial to an emitted kernel, one change a step: `docs/tutorials/from_tutorial.md`.

A step's kernel and the function that launches it stand in that page as they stand here.
"""
