from .rules import batch_norm, views  # noqa: F401  (they register)
