"""Sharded models, in processes of a group of their own, against the same model in one."""
