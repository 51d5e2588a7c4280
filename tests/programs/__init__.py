"""Random Python programs that mix tensors with everything else of the language; see `__main__.py`."""
