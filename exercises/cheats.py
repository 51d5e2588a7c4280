"""Ways to points without work. CI grades each as a learner's file; all must earn nothing. {module}, {name} and {path} are the
original's."""
USE = "space = dict(vars(sys.modules[{module!r}]))\nexec(compile(text, 'x', 'exec'), space)\n{name} = space[{name!r}]\n"
STACK = "import sys\nf = sys._getframe()\n"
SEND = ("import json, os\nfor message in expected:\n    os.write(3, (key + json.dumps(message) + chr(10)).encode())\n"
        "os.write(3, (key + json.dumps(dict(done=True)) + chr(10)).encode())\nos._exit(0)\n")
CHEATS = {
    "import the original": "from {module} import {name} as theirs\ndef {name}(*a, **k):\n    return theirs(*a, **k)\n",
    "reload the module": "import importlib, {module} as m\nm = importlib.reload(m)\n{name} = m.{name}\n",
    "read the source": "import os, sys, {module}\nos.close(0)\nos.chdir(os.path.dirname({path!r}))\n"
                       "text = open(os.path.basename({path!r})).read()\n" + USE,
    "read it by descriptor": "import os, sys, {module}\nos.close(0)\n"
                             "text = os.read(os.open({path!r}.encode(), 0), 1 << 20).decode()\n" + USE,
    "raise the limits": "import os, resource, sys, {module}\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
                        "text = os.read(os.open({path!r}.encode(), 0), 1 << 20).decode()\n" + USE,
    "read it through torch": "import os, sys, torch, {module}\nos.close(0)\nsize = os.stat({path!r}).st_size\n"
                             "text = bytes(torch.from_file({path!r}, dtype=torch.uint8, size=size).tolist()).decode()\n" + USE,
    "inspect.getsource": "import inspect, {module} as m\ntext = inspect.getsource(m)\nspace = dict(vars(m))\nexec(text, space)\n"
                         "{name} = space[{name!r}]\n",
    "search the memory": "import gc, types\n"
                         "found = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__name__ == {name!r} and "
                         "f.__code__.co_filename.endswith('.py')]\ndef {name}(*a, **k):\n    return found[0](*a, **k)\n",
    "another process": "import subprocess, sys, {module}\n"
                       "text = subprocess.run(['cat', {path!r}], capture_output=True, text=True, check=True).stdout\n" + USE,
    "search the memory for texts": "import gc, sys, {module}\nfor o in gc.get_objects():\n"
                                   "    for text in o.values() if type(o) is dict else o if type(o) in (list, tuple) else ():\n"
                                   "        if type(text) is str and 'def {name}(' in text and 'NotDone' not in text:\n"
                                   "            space = dict(vars(sys.modules[{module!r}]))\n            exec(text, space)\n"
                                   "            {name} = space[{name!r}]\n",
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
                           "    def __iter__(self): return iter(())\n"
                           "    def __getattr__(self, n): return Any()\n    def __call__(self, *a, **k): return Any()\n"
                           "    def __getitem__(self, k): return Any()\n"
                           "def {name}(*a, **k):\n    return Any()\n",
    "patch the grader": "import exercises.data, exercises.grade, exercises\nexercises.data.difference = lambda *a, **k: None\n"
                        "exercises.grade.difference = lambda *a, **k: None\nfor t in exercises.TASKS.values():\n"
                        "    for b in t.behaviours:\n"
                        "        b.check = lambda *a: None\n        b.observe = lambda *a: None\ndef {name}(*a, **k):\n    return None\n",
    "patch the report": "import exercises.sandbox as s, json, os\ns.encode = lambda value: True\n"
                        "json.dumps = lambda *a, **k: '{{\"done\": true}}'\n"
                        "s.decode = s.compare = lambda *a: None\ndef {name}(*a, **k):\n    return None\n",
    "patch what compares": "import builtins, torch, torch.testing\ntorch.equal = torch.allclose = lambda *a, **k: True\n"
                           "torch.testing.assert_close = lambda *a, **k: None\n"
                           "builtins.all = builtins.any = builtins.isinstance = builtins.callable = lambda *a: True\n"
                           "builtins.sorted = lambda *a, **k: []\n"
                           "def {name}(*a, **k):\n    return None\n",
    "exit in good order": "import atexit, os, sys\natexit.register(lambda: os.write(3, b'{{\"done\": true}}\\n'))\ndef {name}(*a, **k):\n"
                          "    sys.exit(0)\n",
    "leave early": "import os\nos.write(3, b'{{\"done\": true}}\\n')\nos._exit(0)\n",
    "forge results": "import os, json\nfor i in range(50):\n    os.write(3, (json.dumps(dict(case=i, value=None)) + chr(10)).encode())\n"
                     "os.write(3, b'{{\"done\": true}}\\n')\nos._exit(0)\n",
    "read the caches of the grader": "import exercises.sandbox\nknown = dict(exercises.sandbox.EXPECTED)\nassert known\n"
                                     "def {name}(*a, **k):\n    return known\n",
    "look up the stack": STACK + "while f:\n    for v in list(f.f_locals.values()):\n"
                                 "        if callable(v) and getattr(v, '__name__', '') == {name!r}:\n"
                         "            theirs = v\n    f = f.f_back\ndef {name}(*a, **k):\n    return theirs(*a, **k)\n",
    "send what the stack expects": STACK + "key, expected = '', []\nwhile f:\n"
        "    key, expected = f.f_locals.get('say_key', key), f.f_locals.get('expected', expected)\n    f = f.f_back\n" + SEND,
    "the stack of an error": "try:\n    1 / 0\nexcept Exception as error:\n    f = error.__traceback__.tb_frame\nkey, expected = '', []\n"
                             "while f:\n    key, expected = f.f_locals.get('say_key', key), f.f_locals.get('expected', expected)\n"
                             "    f = f.f_back\n" + SEND,
    "the stack under another name": "space = {{}}\nexec('import sys; f = sys._getframe()', space)\nf, key, expected = space['f'], '', []\n"
                                    "while f:\n    key, expected = f.f_locals.get('say_key', key), f.f_locals.get('expected', expected)\n"
                                    "    f = f.f_back\n" + SEND,
    "find the key in memory": "import gc\nkey, expected = '', [dict(case=i, value=None) for i in range(50)]\nfor o in gc.get_objects():\n"
                              "    if type(o) is dict and 'say_key' in o:\n"
                              "        key = o['say_key']\n" + SEND,
}
