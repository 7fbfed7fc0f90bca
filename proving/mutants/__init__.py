"""Is each test there for a reason? Small edits that break the product on purpose, and the tests that must notice.

`python -m proving mutants` makes each edit of `table/` in a copy of the tree, runs the tests chosen for it there, and
fails if they pass. A mutant that survives is a hole in the tests.
"""
