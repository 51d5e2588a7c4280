"""What the tests with threads share."""
import contextlib
import sys


@contextlib.contextmanager
def eager_switching():
    """Threads take turns as often as the interpreter can let them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
