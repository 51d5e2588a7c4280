from . import recipes  # noqa: F401 (gives fakes what runs an operator on them)
from .rules import forms, refused  # noqa: F401 (they register)
