from setuptools import Extension, setup

# Without CPython's headers neither is built: no_hook.py stands in for the first, full guard checks for the second.
setup(ext_modules=[Extension(f"minicompile.{name}", [f"minicompile/{name.replace('.', '/')}.c"],
                             extra_compile_args=["-O2", "-std=c11"], optional=True)
                   for name in ("ch03_capture.frame_hook", "ch02_guards.unchanged")])
