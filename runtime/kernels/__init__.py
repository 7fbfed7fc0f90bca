"""A kernel on a device: grid, constants, binary, launch. Stands on upstream/ and selection/table.py."""
