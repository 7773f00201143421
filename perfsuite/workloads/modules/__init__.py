"""Transformers in plain PyTorch, readable as a reference; imported only where a step is built."""
