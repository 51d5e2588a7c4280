from setuptools import Extension, setup

setup(ext_modules=[Extension("minicompile.ch03_capture.frame_hook", ["minicompile/ch03_capture/frame_hook.c"],
                             extra_compile_args=["-O2", "-std=c11"],
                             optional=True)])   # without CPython's headers, no_hook.py stands in
