"""Libraries that people train and serve models with, on patched models: equal before and after, and undone by unpatch.

`make test-clients` installs the libraries, which are an extra of their own. A file whose library is missing is skipped,
and the run's last lines name the file.
"""
