"""Libraries that people train and serve models with, on patched models: equal before and after, and undone by unpatch.

`make test-clients` installs the libraries, which are an extra of their own; without them the files are skipped.
"""
