"""Cases of other suites and of our own, judged against fp64 with the tolerances of their suites."""
