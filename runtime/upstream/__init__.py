"""Private interfaces of torch and Triton, each with the public way beside it. Stands on nothing."""
