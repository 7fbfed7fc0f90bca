"""Private interfaces of torch and Triton, each with the public way beside it. Imports nothing of ours."""
