"""Ways to points without work. CI grades each as a learner's file; all must earn nothing. {module}, {name} and {path} are the original's."""
CHEATS = {
    "import the original": "from {module} import {name} as theirs\ndef {name}(*a, **k):\n    return theirs(*a, **k)\n",
    "reload the module": "import importlib, {module} as m\nm = importlib.reload(m)\n{name} = m.{name}\n",
    "read the source": "import ast\ntext = open({path!r}).read()\nspace = dict(vars(__import__({module!r}, fromlist=['x'])))\n"
                       "exec(compile(text.replace('from .', 'from minicompile.ch01_graphs.'), 'x', 'exec'), space)\n{name} = space[{name!r}]\n",
    "read it through torch": "import torch, os\nraw = bytes(torch.from_file({path!r}, dtype=torch.uint8, size=4000).tolist())\n"
                             "def {name}(*a, **k):\n    raise ValueError(raw)\n",
    "inspect.getsource": "import inspect, {module} as m\ntext = inspect.getsource(m)\nspace = dict(vars(m))\nexec(text, space)\n{name} = space[{name!r}]\n",
    "search the memory": "import gc, types\nfound = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__name__ == {name!r} and "
                         "f.__code__.co_filename.endswith('.py')]\ndef {name}(*a, **k):\n    return found[0](*a, **k)\n",
    "another process": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'pass'], check=True)\ndef {name}(*a, **k):\n    pass\n",
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n    def __iter__(self): return iter(())\n"
                           "    def __getattr__(self, n): return Any()\n    def __call__(self, *a, **k): return Any()\n    def __getitem__(self, k): return Any()\n"
                           "def {name}(*a, **k):\n    return Any()\n",
    "patch the grader": "import exercises.data, exercises.grade, exercises\nexercises.data.difference = lambda *a, **k: None\n"
                        "exercises.grade.difference = lambda *a, **k: None\nfor t in exercises.TASKS.values():\n    for b in t.behaviours:\n"
                        "        b.check = lambda *a: None\n        b.observe = lambda *a: None\ndef {name}(*a, **k):\n    return None\n",
    "leave early": "import os\nos.write(3, b'{{\"done\": true}}\\n')\nos._exit(0)\n",
    "forge results": "import os, json\nfor i in range(50):\n    os.write(3, (json.dumps(dict(case=i, value=None)) + chr(10)).encode())\n"
                     "os.write(3, b'{{\"done\": true}}\\n')\nos._exit(0)\n",
    "read the caches of the grader": "import exercises.grade, sys\nknown = dict(exercises.grade._expected)\nassert known\ndef {name}(*a, **k):\n    return known\n",
    "look up the stack": "import sys\nf = sys._getframe()\nwhile f:\n    for v in list(f.f_locals.values()):\n        if callable(v) and getattr(v, '__name__', '') == {name!r}:\n"
                         "            theirs = v\n    f = f.f_back\ndef {name}(*a, **k):\n    return theirs(*a, **k)\n",
}
