/* A compiled kernel as a Python callable.
 *
 * Calling `kernel(tensor, ..., int, ...)` fetches the tensors' addresses, checks their alignment, asks for the current stream and hands
 * all to the CUDA driver: about half a microsecond above the driver's own time. Only the driver's C interface is used, found at run time
 * with dlopen, so that this file builds on any machine with a C compiler and no CUDA toolkit.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_ARGS 1024
#define CUDA_ERROR_INVALID_CONTEXT 201
#define MAX_DYNAMIC_SHARED_SIZE_BYTES 8

static struct {
    int (*init)(unsigned);
    int (*module_load)(void **module, const void *image);
    int (*module_unload)(void *module);
    int (*get_function)(void **function, void *module, const char *name);
    int (*set_attribute)(void *function, int attribute, int value);
    int (*get_attribute)(int *value, int attribute, void *function);
    int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void *stream, void **params, void **extra);
    int (*error_string)(int code, const char **text);
    int (*get_device)(int *device, int ordinal);
    int (*retain_context)(void **context, int device);
    int (*set_context)(void *context);
    int (*get_context)(void **context);
} cuda;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    void *module, *function;
    unsigned grid, threads, shared;
    int pointers, integers, narrow;     /* narrow: the integers are 32 bits wide in the kernel */
    int ordinal;                        /* device number */
    uint64_t alignment;                 /* a pointer with any of these bits set goes to `fallback` */
    int registers, spills;
    PyObject *device, *get_stream, *grid_function, *fallback;
} Kernel;

static PyObject *name_data_ptr;

static int load_driver(void) {
    static const struct { const char *name; size_t offset; } table[] = {
        {"cuInit", offsetof(__typeof__(cuda), init)}, {"cuModuleLoadData", offsetof(__typeof__(cuda), module_load)},
        {"cuModuleUnload", offsetof(__typeof__(cuda), module_unload)},
        {"cuModuleGetFunction", offsetof(__typeof__(cuda), get_function)},
        {"cuFuncSetAttribute", offsetof(__typeof__(cuda), set_attribute)},
        {"cuFuncGetAttribute", offsetof(__typeof__(cuda), get_attribute)},
        {"cuLaunchKernel", offsetof(__typeof__(cuda), launch)}, {"cuGetErrorString", offsetof(__typeof__(cuda), error_string)},
        {"cuDeviceGet", offsetof(__typeof__(cuda), get_device)},
        {"cuDevicePrimaryCtxRetain", offsetof(__typeof__(cuda), retain_context)},
        {"cuCtxSetCurrent", offsetof(__typeof__(cuda), set_context)},
        {"cuCtxGetCurrent", offsetof(__typeof__(cuda), get_context)},
    };
    if (cuda.launch) return 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) { PyErr_Format(PyExc_RuntimeError, "cannot open the CUDA driver: %s", dlerror()); return -1; }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        void *symbol = dlsym(library, table[i].name);
        if (!symbol) { PyErr_Format(PyExc_RuntimeError, "the CUDA driver has no %s", table[i].name); cuda.launch = NULL; return -1; }
        *(void **)((char *)&cuda + table[i].offset) = symbol;
    }
    return 0;
}

static PyObject *fail(const char *what, int code) {
    const char *text = NULL;
    cuda.error_string(code, &text);
    return PyErr_Format(PyExc_RuntimeError, "CUDA error while %s: %s", what, text ? text : "unknown");
}

/* A thread that has made no CUDA call yet has no context; the device's primary one is the one that PyTorch uses. */
static int ensure_context(int ordinal) {
    void *context = NULL;
    int device;
    if (!cuda.get_context(&context) && context) return 0;
    int code = cuda.init(0);
    if (!code) code = cuda.get_device(&device, ordinal);
    if (!code) code = cuda.retain_context(&context, device);
    if (!code) code = cuda.set_context(context);
    return code;
}

static int fetch_pointer(PyObject *object, uint64_t *out) {
    PyObject *number = PyLong_Check(object) ? Py_NewRef(object) : PyObject_CallMethodNoArgs(object, name_data_ptr);
    if (!number) return -1;
    *out = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *out == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *kernel_call(PyObject *self, PyObject *const *args, size_t flags, PyObject *keywords) {
    Kernel *k = (Kernel *)self;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (count != k->pointers + k->integers || (keywords && PyTuple_GET_SIZE(keywords)))
        return PyErr_Format(PyExc_TypeError, "the kernel takes %d tensors and %d integers, not %zd arguments",
                            k->pointers, k->integers, count);
    uint64_t values[MAX_ARGS + 2], misaligned = 0;
    void *params[MAX_ARGS + 2];
    for (Py_ssize_t i = 0; i < count; i++) {
        params[i] = &values[i];
        if (i < k->pointers) {
            if (fetch_pointer(args[i], &values[i]) < 0) return NULL;
            misaligned |= values[i] & k->alignment;
        } else {
            int64_t value = PyLong_AsLongLong(args[i]);
            if (value == -1 && PyErr_Occurred()) return NULL;
            if (k->narrow && value != (int32_t)value) { PyErr_SetString(PyExc_OverflowError, "a size exceeds 32 bits"); return NULL; }
            values[i] = (uint64_t)value;
        }
    }
    if (misaligned) return PyObject_Vectorcall(k->fallback, args, count, NULL);
    for (Py_ssize_t i = count; i < count + 2; i++) { values[i] = 0; params[i] = &values[i]; }   /* Triton's scratch pointers: none */
    unsigned grid = k->grid;
    if (k->grid_function != Py_None) {
        PyObject *result = PyObject_Vectorcall(k->grid_function, args + k->pointers, k->integers, NULL);
        if (!result) return NULL;
        grid = (unsigned)PyLong_AsUnsignedLong(result);
        Py_DECREF(result);
        if (PyErr_Occurred()) return NULL;
    }
    if (!grid) Py_RETURN_NONE;
    PyObject *stream_object = PyObject_CallOneArg(k->get_stream, k->device);
    if (!stream_object) return NULL;
    void *stream = PyLong_AsVoidPtr(stream_object);
    Py_DECREF(stream_object);
    if (!stream && PyErr_Occurred()) return NULL;
    int code = cuda.launch(k->function, grid, 1, 1, k->threads, 1, 1, k->shared, stream, params, NULL);
    if (code == CUDA_ERROR_INVALID_CONTEXT && !ensure_context(k->ordinal))
        code = cuda.launch(k->function, grid, 1, 1, k->threads, 1, 1, k->shared, stream, params, NULL);
    if (code) return fail("launching a kernel", code);
    Py_RETURN_NONE;
}

/* load(cubin, name, device, threads, shared, pointers, integers, narrow, grid, grid_function, get_stream, alignment, fallback) */
static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    const char *image, *name;
    Py_ssize_t size;
    int ordinal, threads, shared, pointers, integers, narrow;
    unsigned grid;
    unsigned long long alignment;
    PyObject *grid_function, *get_stream, *fallback;
    if (!PyArg_ParseTuple(args, "y#siiiiipIOOKO", &image, &size, &name, &ordinal, &threads, &shared, &pointers, &integers, &narrow,
                          &grid, &grid_function, &get_stream, &alignment, &fallback)) return NULL;
    if (pointers + integers > MAX_ARGS) return PyErr_Format(PyExc_ValueError, "a kernel of more than %d arguments", MAX_ARGS);
    if (load_driver() < 0) return NULL;
    int code = ensure_context(ordinal);
    if (code) return fail("choosing the device", code);
    void *module = NULL, *function = NULL;
    if ((code = cuda.module_load(&module, image))) return fail("loading a kernel", code);
    code = cuda.get_function(&function, module, name);
    if (!code && shared > 48 * 1024) code = cuda.set_attribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
    if (code) { cuda.module_unload(module); return fail("preparing a kernel", code); }
    Kernel *k = (Kernel *)type->tp_alloc(type, 0);
    if (!k) { cuda.module_unload(module); return NULL; }
    cuda.get_attribute(&k->registers, 4, function);
    cuda.get_attribute(&k->spills, 3, function);
    k->vectorcall = kernel_call;
    k->module = module; k->function = function;
    k->grid = grid; k->threads = threads; k->shared = shared;
    k->pointers = pointers; k->integers = integers; k->narrow = narrow; k->ordinal = ordinal; k->alignment = alignment;
    k->device = PyLong_FromLong(ordinal);
    k->get_stream = Py_NewRef(get_stream); k->grid_function = Py_NewRef(grid_function); k->fallback = Py_NewRef(fallback);
    return (PyObject *)k;
}

static void kernel_dealloc(PyObject *self) {
    Kernel *k = (Kernel *)self;
    /* The module stays loaded: unloading would have to wait for launches in flight, and kernels live as long as the program. */
    Py_XDECREF(k->device); Py_XDECREF(k->get_stream); Py_XDECREF(k->grid_function); Py_XDECREF(k->fallback);
    Py_TYPE(self)->tp_free(self);
}

#include <structmember.h>
static PyMemberDef kernel_members[] = {
    {"registers", T_INT, offsetof(Kernel, registers), READONLY, "registers per thread"},
    {"spills", T_INT, offsetof(Kernel, spills), READONLY, "bytes of local memory per thread"},
    {NULL},
};

static PyTypeObject kernel_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "minicompile.Kernel", .tp_basicsize = sizeof(Kernel), .tp_new = kernel_new, .tp_dealloc = kernel_dealloc,
    .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Kernel, vectorcall), .tp_members = kernel_members,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_doc = "a loaded CUDA kernel",
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "minicompile_launcher", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_minicompile_launcher(void) {
    if (PyType_Ready(&kernel_type) < 0) return NULL;
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Kernel", (PyObject *)&kernel_type) < 0) Py_CLEAR(module);
    return module;
}
