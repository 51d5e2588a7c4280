// How Python calls a kernel: compiled by itself, once, and kept in the cache of kernels, whose files need nothing of Python. The few
// functions of the CPython API that it takes are declared here by hand; they are part of the stable ABI, or as PyVectorcall_Function in
// each version since 3.9, so that neither headers nor the version of Python matter.
extern "C" {
struct PyObject;
struct PyThreadState;
typedef PyObject* (*mc_fastcall)(PyObject*, PyObject* const*, long);
struct PyMethodDef { const char* name; mc_fastcall call; int flags; const char* doc; };
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
typedef PyObject* (*mc_vectorcall)(PyObject*, PyObject* const*, unsigned long, PyObject*);
mc_vectorcall PyVectorcall_Function(PyObject*);
typedef int (*mc_memory_of)(PyObject*, void**);
void* PyLong_AsVoidPtr(PyObject*);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyErr_Occurred();
PyObject* PyErr_NoMemory();
PyObject* PyErr_Format(PyObject*, const char*, ...);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
void* PyMem_Malloc(unsigned long);
void PyMem_Free(void*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);
PyObject* PyImport_ImportModule(const char*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
extern PyObject *PyExc_RuntimeError, *PyExc_TypeError, *PyExc_OSError;
extern PyObject _Py_NoneStruct;
void* dlopen(const char*, int);
void* dlsym(void*, const char*);
const char* dlerror();
int dlclose(void*);
}

struct mc_kernel {
  void (*run)(void**, const int64_t*, mc_problem*);
  int tensors, sizes, small;
  void* library;
  PyObject* data_ptr;  // the method torch.Tensor.data_ptr, and how it is called
  mc_vectorcall address_of;
  mc_memory_of memory_of;  // what the extension of the memos has in its place, or null
  PyMethodDef definition;
  char name[];
};

static PyObject* mc_out_of_range(mc_problem problem) {
  PyObject* errors = PyImport_ImportModule("minicompile.errors");
  PyObject* type = errors ? PyObject_GetAttrString(errors, "OutOfRange") : nullptr;
  if (type) {
    PyErr_Format(type, "index %lld is out of bounds for dimension with size %lld", (long long)problem.value,
                 (long long)problem.size);
    Py_DecRef(type);
  }
  if (errors) Py_DecRef(errors);
  return nullptr;
}

static PyObject* mc_launch(PyObject* self, PyObject* const* args, long n) {
  const mc_kernel* kernel = (mc_kernel*)PyCapsule_GetPointer(self, nullptr);
  const int tensors = kernel->tensors, sizes = kernel->sizes;
  if (n != tensors + sizes)
    return PyErr_Format(PyExc_TypeError, "this kernel takes %d arguments, got %ld", tensors + sizes, n);
  int64_t values[n + 1], *numbers = values + tensors;
  void** pointers = (void**)values;
  for (int i = 0; i < tensors; i++) {
    if (kernel->memory_of) {
      if (!kernel->memory_of(args[i], &pointers[i])) return nullptr;
      continue;
    }
    PyObject* address = kernel->address_of(kernel->data_ptr, args + i, 1, nullptr);
    if (!address) return nullptr;
    pointers[i] = PyLong_AsVoidPtr(address);
    Py_DecRef(address);
  }
  for (int i = 0; i < sizes; i++) {
    numbers[i] = PyLong_AsLongLong(args[tensors + i]);
    if (numbers[i] == -1 && PyErr_Occurred()) return nullptr;
  }
  mc_problem problem = {0, 0, 0};
  PyThreadState* state = kernel->small ? nullptr : PyEval_SaveThread();
  kernel->run(pointers, numbers, &problem);
  if (state) PyEval_RestoreThread(state);
  if (problem.kind == 1) return mc_out_of_range(problem);
  if (problem.kind == 3) return PyErr_NoMemory();
  if (problem.kind) return PyErr_Format(PyExc_RuntimeError, "ZeroDivisionError");
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

static void mc_free(mc_kernel* kernel) {
  dlclose(kernel->library);
  Py_DecRef(kernel->data_ptr);
  PyMem_Free(kernel);
}

static void mc_drop(PyObject* capsule) { mc_free((mc_kernel*)PyCapsule_GetPointer(capsule, nullptr)); }

// A function holds its kernel, and with it one of the references to the library that `dlopen` counts: with the last function of a file the
// library is closed. The definition of a function lies in what the function holds; CPython promises to look at it no more when it
// lets go of that.
extern "C" PyObject* mc_function(const char* path, const char* name, int tensors, int sizes, int small, PyObject* data_ptr,
                                 mc_memory_of memory_of) {
  void* library = dlopen(path, 2 /* RTLD_NOW */);
  if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  void* run = dlsym(library, name);
  const unsigned long length = __builtin_strlen(name) + 1;
  mc_kernel* kernel = run ? (mc_kernel*)PyMem_Malloc(sizeof(mc_kernel) + length) : nullptr;
  if (!kernel) {
    run ? PyErr_NoMemory() : PyErr_Format(PyExc_OSError, "%s", dlerror());
    dlclose(library);
    return nullptr;
  }
  *kernel = {(decltype(kernel->run))run, tensors, sizes, small, library, data_ptr, PyVectorcall_Function(data_ptr), memory_of,
             {kernel->name, mc_launch, 0x80 /* METH_FASTCALL */, nullptr}};
  __builtin_memcpy(kernel->name, name, length);
  Py_IncRef(data_ptr);
  PyObject* capsule = PyCapsule_New(kernel, nullptr, mc_drop);
  if (!capsule) {
    mc_free(kernel);
    return nullptr;
  }
  PyObject* function = PyCFunction_NewEx(&kernel->definition, capsule, nullptr);
  Py_DecRef(capsule);
  return function;
}
