"""Private interfaces of torch, Triton and jaxlib, each with the public way beside it. Stands on nothing."""
