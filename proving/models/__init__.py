"""Which of Hugging Face's norm classes `patch` takes: every one that transformers has, made small and patched."""
