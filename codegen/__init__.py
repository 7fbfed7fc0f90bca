"""The generator: manifest, names, tiles and templates; it imports neither torch nor triton. Stands on nothing."""
