// Included (as text) at the end of every generated C++ file: how Python calls a kernel. The few functions of
// the CPython API that it takes are declared here by hand; they are part of the stable ABI, and Python.h
// would take longer to parse than the kernels take to compile.
extern "C" {
struct PyObject;
struct PyThreadState;
typedef PyObject* (*mc_fastcall)(PyObject*, PyObject* const*, long);
struct PyMethodDef { const char* name; mc_fastcall call; int flags; const char* doc; };
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, unsigned long, PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyErr_Occurred();
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
int dlclose(void*);
PyObject* PyErr_Format(PyObject*, const char*, ...);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);
PyObject* PyImport_ImportModule(const char*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
extern PyObject *PyExc_RuntimeError, *PyExc_TypeError;
extern PyObject _Py_NoneStruct;
}
typedef void (*mc_kernel)(void**, const int64_t*, mc_problem*);
static PyObject* mc_data_ptr;  // the method torch.Tensor.data_ptr

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

static PyObject* mc_launch(mc_kernel kernel, void** pointers, int64_t* numbers, int tensors, int sizes,
                           PyObject* const* args, long n) {
  if (n != tensors + sizes)
    return PyErr_Format(PyExc_TypeError, "this kernel takes %d arguments, got %ld", tensors + sizes, n);
  for (int i = 0; i < tensors; i++) {
    PyObject* address = PyObject_Vectorcall(mc_data_ptr, args + i, 1, nullptr);
    if (!address) return nullptr;
    pointers[i] = PyLong_AsVoidPtr(address);
    Py_DecRef(address);
  }
  for (int i = 0; i < sizes; i++) {
    numbers[i] = PyLong_AsLongLong(args[tensors + i]);
    if (numbers[i] == -1 && PyErr_Occurred()) return nullptr;
  }
  mc_problem problem = {0, 0, 0};
  PyThreadState* state = PyEval_SaveThread();
  kernel(pointers, numbers, &problem);
  PyEval_RestoreThread(state);
  if (problem.kind == 1) return mc_out_of_range(problem);
  if (problem.kind) return PyErr_Format(PyExc_RuntimeError, "ZeroDivisionError");
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// The functions of a file hold its `library`, made here in *another* file, and nobody else does. When the last one
// is gone, none can be running, and the file is closed. (CPython looks at a PyMethodDef until just before it lets go
// of what the function holds.)
static void mc_close(PyObject* library) { dlclose(PyCapsule_GetPointer(library, nullptr)); }
extern "C" PyObject* mc_library(void* handle) { return PyCapsule_New(handle, nullptr, mc_close); }

#define MC_FUNCTION(name, tensors, sizes)                                                    \
  static PyObject* name##_call(PyObject* library, PyObject* const* args, long n) {           \
    void* pointers[(tensors) + 1];                                                           \
    int64_t numbers[(sizes) + 1];                                                            \
    return mc_launch(name, pointers, numbers, tensors, sizes, args, n);                      \
  }                                                                                          \
  static PyMethodDef name##_def = {#name, name##_call, 0x80 /* METH_FASTCALL */, nullptr};   \
  extern "C" PyObject* name##_function(PyObject* library, PyObject* data_ptr) {              \
    mc_data_ptr = data_ptr;                                                                  \
    return PyCFunction_NewEx(&name##_def, library, nullptr);                                 \
  }
