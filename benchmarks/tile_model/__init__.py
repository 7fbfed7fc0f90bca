"""A model of tiles on GPUs that are not here: occupancy, and bytes in flight, from binaries compiled for them."""
