"""Norms of JAX arrays. Where JAX is not installed none of these files is collected; see `settled`."""
