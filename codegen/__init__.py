"""The generator: manifest, names, tiles and templates. Imports neither torch nor triton."""
