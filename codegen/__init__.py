"""The generator: manifest, names, tiles and templates; imports neither torch nor triton. Stands on nothing."""
