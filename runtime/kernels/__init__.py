"""A kernel on a device: grid, constants, binary, launch. Stands on codegen/ and upstream/."""
