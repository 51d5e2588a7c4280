from . import recipes  # noqa: F401 (gives fakes what runs an operator on them)
