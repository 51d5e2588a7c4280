/* "Nothing that the guards looked at has changed since they last held": one C call instead of a thousand guards.
 *
 * A Memo remembers a call for which all guards of some kind held. It is called with the same arguments as those guards
 * and answers a tuple when it can prove that they would hold again, None when it cannot: then the guards are evaluated.
 * So it may say None too often, never a tuple too often. Proof, in order:
 *
 *   1. the roots, the first arguments, are the same objects as then;
 *   2. `things` that are reached from them are as they were: a dict by its version, which CPython changes at every write;
 *      an object by its class, the version of that class, and its `__dict__`; a class by its version, a
 *      function by its code and defaults (both given as weak references). A dict that was found written once is,
 *      at another version, compared by the values at the keys that guards read: `model.step += 1` costs no full check;
 *   3. tensors have the class, dispatch keys, dtype, device, sizes, strides and `requires_grad` they had.
 *
 * All pointers are borrowed: a memo keeps nothing alive but numbers and strings. A pointer is followed only after the
 * dict that holds the object was found unchanged; `things` must therefore be given in the order in which they are
 * reached. Versions are never used twice in a process, so that an object that died and another that got its address are
 * told apart; where values are compared, weak references do that.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_VARIANTS 64 /* modules that share an entry, such as the blocks of a transformer */
#define MOST_SHAPES 4    /* for arguments without a root */
#define MOST_DIMS 8
#define MOST_OF_IMPL 192 /* bytes of a TensorImpl: the dispatch keys are its last field */

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

/* A tensor object holds a pointer to its TensorImpl, and the place of that pointer is what PyTorch's C interface for
 * compiled code (torch/csrc/inductor/aoti_torch/c/shim.h) calls an AtenTensorHandle. Asking through it costs 2
 * nanoseconds a question; the methods of Python cost 30 to 100, since they look for modes and release the GIL. Two facts
 * have no function there. `requires_grad` is a member function of TensorImpl. The dispatch keys, which tell dense from
 * sparse, pending negation and conjugation, inference tensors and wrappers, are a field, whose place `setup` finds by
 * comparing tensors of many kinds with the keys they say they have. */
typedef void *const *Handle;
typedef struct {
    int32_t (*dim)(Handle, int64_t *);
    int32_t (*sizes)(Handle, int64_t **);
    int32_t (*strides)(Handle, int64_t **);
    int32_t (*dtype)(Handle, int32_t *);
    int32_t (*device_type)(Handle, int32_t *);
    int32_t (*device_index)(Handle, int32_t *);
    int32_t (*layout)(Handle, int32_t *);
    _Bool (*requires_grad)(const void *impl);
} Questions;

static Questions ask;
static PyObject *plain_types = NULL; /* tuple of tensor classes without behaviour of their own; NULL: no tensor is known */
static Py_ssize_t impl_at, keys_at;  /* offsets in bytes: in the Python object, in the TensorImpl */

typedef struct {
    PyTypeObject *type;
    uint64_t keys;
    int64_t ndim, sizes[2 * MOST_DIMS];
    int32_t dtype, device_type, device_index;
    _Bool requires_grad;
} Facts;

static inline Handle handle_of(PyObject *t) { return (Handle)((char *)t + impl_at); }
static inline uint64_t keys_of(Handle h) { return *(const uint64_t *)((const char *)*h + keys_at); }

/* 1 and the facts, or 0 when this tensor cannot be described by them. */
static int tensor_facts(PyObject *t, Facts *facts)
{
    int64_t *sizes, *strides;
    int32_t layout;
    int plain = 0;
    for (Py_ssize_t i = 0; plain_types != NULL && i < PyTuple_GET_SIZE(plain_types) && !plain; i++)
        plain = (PyObject *)Py_TYPE(t) == PyTuple_GET_ITEM(plain_types, i);
    if (!plain)
        return 0;
    Handle h = handle_of(t);
    memset(facts, 0, sizeof(Facts));
    facts->type = Py_TYPE(t);
    facts->keys = keys_of(h);
    if (ask.layout(h, &layout) || layout != 0 /* strided */ || ask.dim(h, &facts->ndim) || facts->ndim > MOST_DIMS ||
        ask.sizes(h, &sizes) || ask.strides(h, &strides) || ask.dtype(h, &facts->dtype) ||
        ask.device_type(h, &facts->device_type) || ask.device_index(h, &facts->device_index))
        return 0;
    memcpy(facts->sizes, sizes, facts->ndim * sizeof(int64_t));
    memcpy(facts->sizes + facts->ndim, strides, facts->ndim * sizeof(int64_t));
    facts->requires_grad = ask.requires_grad(*h);
    return 1;
}

/* The keys come first: with those of then, the other questions have answers. */
static inline int has_facts(PyObject *t, const Facts *facts)
{
    if (Py_TYPE(t) != facts->type)
        return 0;
    Handle h = handle_of(t);
    int64_t ndim, *sizes, *strides;
    int32_t dtype, device_type, device_index;
    if (keys_of(h) != facts->keys || ask.dim(h, &ndim) || ndim != facts->ndim || ask.dtype(h, &dtype) ||
        dtype != facts->dtype || ask.device_type(h, &device_type) || device_type != facts->device_type ||
        ask.device_index(h, &device_index) || device_index != facts->device_index ||
        ask.requires_grad(*h) != facts->requires_grad || ask.sizes(h, &sizes) || ask.strides(h, &strides))
        return 0;
    for (int64_t i = 0; i < ndim; i++)
        if (sizes[i] != facts->sizes[i] || strides[i] != facts->sizes[ndim + i])
            return 0;
    return 1;
}

/* ---- versions --------------------------------------------------------------------------------------------------- */

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
#define DICT_VERSION(d) (((PyDictObject *)(d))->ma_version_tag)

/* In 3.13 an instance keeps its attributes in itself and its dict is a view of them; writing an attribute then does not
 * change the dict's version, nor does it tell the dict's watchers. Giving the object another dict and then its own again
 * ends that: the attributes have moved into the dict. The program cannot see a difference. */
static int settle(PyObject *object, PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030D0000
    if (!PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_INLINE_VALUES))
        return 1;
    PyObject *other = PyDict_New(), *name = PyUnicode_InternFromString("__dict__");
    Py_INCREF(dict);
    int failed = other == NULL || name == NULL || PyObject_GenericSetAttr(object, name, other) < 0 ||
                 PyObject_GenericSetAttr(object, name, dict) < 0;
    Py_DECREF(dict);
    Py_XDECREF(other);
    Py_XDECREF(name);
    if (failed)
        return PyErr_Clear(), 0;
#endif
    return 1;
}

PyAPI_FUNC(PyObject *) _PyType_Lookup(PyTypeObject *, PyObject *);

/* 0 when the class has none (it was changed very often). */
static unsigned int type_version(PyTypeObject *type)
{
    static PyObject *name = NULL;
    if (type->tp_version_tag == 0 && (name != NULL || (name = PyUnicode_InternFromString("__class__")) != NULL))
        _PyType_Lookup(type, name); /* gives it one */
    return type->tp_version_tag;
}

/* ---- slots ------------------------------------------------------------------------------------------------------ */

/* The value at one key of a dict, and what tells it from a later object at the same address: a weak reference; for what
 * takes none, such as numbers, a strong one. Of a container only the class matters: guards on its contents are evaluated
 * at every call, or it is a thing of its own. */
typedef struct { PyObject *key, *value, *keeper; PyTypeObject *type; } Slot;

static int leads_nowhere(PyObject *v)
{
    for (Py_ssize_t i = 0; PyTuple_CheckExact(v) && i < PyTuple_GET_SIZE(v); i++)
        if (PyObject_IS_GC(PyTuple_GET_ITEM(v, i)))
            return 0;
    return PyTuple_CheckExact(v) || !PyObject_IS_GC(v);
}

static int describe_slot(PyObject *dict, PyObject *key, Slot *slot)
{
    slot->key = key;
    slot->value = PyDict_GetItemWithError(dict, key);
    if (slot->value == NULL)
        return !PyErr_Occurred();
    slot->type = Py_TYPE(slot->value);
    if (PyDict_Check(slot->value) || PyList_Check(slot->value) || PyAnySet_Check(slot->value))
        return 1;
    slot->keeper = PyWeakref_NewRef(slot->value, NULL);
    if (slot->keeper == NULL && leads_nowhere(slot->value))
        slot->keeper = Py_NewRef(slot->value);
    return slot->keeper != NULL;
}

static inline int slot_unchanged(PyObject *dict, const Slot *slot)
{
    PyObject *value = PyDict_GetItemWithError(dict, slot->key);
    if (value != slot->value)
        return 0;
    return value == NULL || (Py_TYPE(value) == slot->type &&
                             (slot->keeper == NULL || slot->keeper == value || PyWeakref_GET_OBJECT(slot->keeper) == value));
}

/* ---- things ----------------------------------------------------------------------------------------------------- */

typedef struct {
    enum { DICT, OBJECT, CLASS, FUNCTION } kind;
    PyObject *object;
    PyObject *code, *defaults; /* of a function; the guards keep what they were */
    PyTypeObject *type;
    unsigned int type_version;
    PyObject *dict; /* the dict, that of an object, or a function's keyword-only defaults; NULL if there is none */
    uint64_t dict_version;
    Slot *slot; /* what to compare when the version differs; NULL: that is a change */
    Py_ssize_t slots;
} Thing;

typedef struct { PyObject *object; Facts facts; } Tensor;

typedef struct Variant {
    struct Variant *next;
    Py_ssize_t arguments, things, tensors, outputs;
    PyObject **root;
    Thing *thing;
    Tensor *tensor; /* the tensors among the arguments come first; their `object` is NULL */
    PyObject **output;
} Variant;

static PyObject *dict_of(PyObject *object) /* borrowed from the object; NULL if it has none */
{
    PyObject *dict = PyObject_GenericGetDict(object, NULL);
    if (dict == NULL)
        PyErr_Clear();
    Py_XDECREF(dict);
    return dict;
}

static void free_slots(Thing *thing)
{
    for (Py_ssize_t i = 0; i < thing->slots; i++)
        Py_XDECREF(thing->slot[i].keeper);
    PyMem_Free(thing->slot);
    thing->slot = NULL;
    thing->slots = 0;
}

static void describe_slots(Thing *thing, PyObject *keys)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keys);
    int good = (thing->slot = PyMem_Calloc(count + 1, sizeof(Slot))) != NULL;
    while (good && thing->slots < count) {
        good = describe_slot(thing->dict, PyTuple_GET_ITEM(keys, thing->slots), &thing->slot[thing->slots]);
        thing->slots++;
    }
    PyErr_Clear();
    if (!good)
        free_slots(thing); /* then the version must do */
}

/* Whether other values are written to it from call to call, and it is known which of them matter. */
static int is_written(const Thing *now, const Thing *before, PyObject *keys)
{
    return keys != Py_None && before != NULL && before->dict == now->dict &&
           (before->slot != NULL || before->dict_version != now->dict_version);
}

/* before: the same thing as the memo knew it, or NULL. keys: a tuple of those that are read, or None for all. */
static int describe_thing(PyObject *object, Thing *thing, const Thing *before, PyObject *keys)
{
    thing->object = object;
    if (PyWeakref_Check(object)) {
        PyFunctionObject *function = (PyFunctionObject *)PyWeakref_GET_OBJECT(object);
        if (PyFunction_Check(function)) {
            thing->kind = FUNCTION;
            thing->code = function->func_code, thing->defaults = function->func_defaults;
            if ((thing->dict = function->func_kwdefaults) != NULL) { /* may also change in place */
                if (!PyDict_CheckExact(thing->dict))
                    return 0;
                thing->dict_version = DICT_VERSION(thing->dict);
            }
            return 1;
        }
        thing->kind = CLASS;
        thing->type = (PyTypeObject *)PyWeakref_GET_OBJECT(object);
        return PyType_Check(thing->type) && (thing->type_version = type_version(thing->type)) != 0;
    }
    if (PyDict_CheckExact(object) || (PyDict_Check(object) && PyDict_GET_SIZE(object) == 0)) {
        thing->kind = DICT;
        thing->dict = object;
        thing->dict_version = DICT_VERSION(object);
        if (is_written(thing, before, keys))
            describe_slots(thing, keys);
        return 1;
    }
    thing->kind = OBJECT;
    thing->type = Py_TYPE(object);
    thing->dict = dict_of(object);
    if (thing->dict != NULL) {
        PyObject *seen = PyObject_GetAttrString(object, "__dict__");
        Py_XDECREF(seen);
        if (seen != thing->dict || !settle(object, seen)) /* the class has a `__dict__` of its own making */
            return PyErr_Clear(), 0;
        thing->dict_version = DICT_VERSION(thing->dict);
        if (is_written(thing, before, keys))
            describe_slots(thing, keys);
    }
    return (thing->type_version = type_version(thing->type)) != 0;
}

/* A dict that is sometimes written has the version with which its values were last found to be the same. It is read
 * before the values are, so that a write in between is seen the next time. */
static inline int dict_unchanged(Thing *thing)
{
    uint64_t version = DICT_VERSION(thing->dict);
    if (version == thing->dict_version)
        return 1;
    if (thing->slot == NULL)
        return 0;
    for (Py_ssize_t i = 0; i < thing->slots; i++)
        if (!slot_unchanged(thing->dict, &thing->slot[i]))
            return 0;
    thing->dict_version = version;
    return 1;
}

static inline int thing_unchanged(Thing *thing)
{
    switch (thing->kind) {
    case DICT:
        return PyDict_Check(thing->object) && dict_unchanged(thing);
    case CLASS:
        return PyWeakref_GET_OBJECT(thing->object) == (PyObject *)thing->type &&
               thing->type->tp_version_tag == thing->type_version;
    case FUNCTION: {
        PyFunctionObject *function = (PyFunctionObject *)PyWeakref_GET_OBJECT(thing->object);
        return (PyObject *)function != Py_None && function->func_code == thing->code &&
               function->func_defaults == thing->defaults && function->func_kwdefaults == thing->dict &&
               (thing->dict == NULL || DICT_VERSION(thing->dict) == thing->dict_version);
    }
    default:
        return Py_TYPE(thing->object) == thing->type && thing->type->tp_version_tag == thing->type_version &&
               (thing->dict == NULL || (dict_of(thing->object) == thing->dict && dict_unchanged(thing)));
    }
}

/* ---- the memo --------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Py_ssize_t roots;  /* so many arguments are compared by identity, the others are tensors */
    PyObject *keys;    /* for each thing a tuple of the keys that guards read, or None */
    Py_ssize_t hits, records;
    Variant *variants; /* most recently used first */
} Memo;

static void free_variant(Variant *v)
{
    for (Py_ssize_t i = 0; v->thing != NULL && i < v->things; i++)
        free_slots(&v->thing[i]);
    PyMem_Free(v->root);
    PyMem_Free(v->thing);
    PyMem_Free(v->tensor);
    PyMem_Free(v->output);
    PyMem_Free(v);
}

static void forget(Memo *self)
{
    while (self->variants != NULL) {
        Variant *v = self->variants;
        self->variants = v->next;
        free_variant(v);
    }
}

static int same_roots(const Variant *v, Py_ssize_t roots, PyObject *const *args, Py_ssize_t count)
{
    return v->arguments == count && memcmp(v->root, args, roots * sizeof(PyObject *)) == 0;
}

static int holds(const Memo *self, const Variant *v, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t loose = count - self->roots;
    for (Py_ssize_t i = 0; i < v->things; i++)
        if (!thing_unchanged(&v->thing[i]))
            return 0;
    for (Py_ssize_t i = 0; i < v->tensors; i++)
        if (!has_facts(i < loose ? args[self->roots + i] : v->tensor[i].object, &v->tensor[i].facts))
            return 0;
    return 1;
}

static PyObject *memo_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Memo *self = (Memo *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    Variant **at = &self->variants, *v;
    while ((v = *at) != NULL) {
        if (same_roots(v, self->roots, args, count) && holds(self, v, args, count)) {
            *at = v->next;
            v->next = self->variants;
            self->variants = v;
            self->hits++;
            PyObject *result = PyTuple_New(v->outputs);
            for (Py_ssize_t i = 0; result != NULL && i < v->outputs; i++)
                PyTuple_SET_ITEM(result, i, Py_NewRef(v->output[i]));
            return result;
        }
        at = &v->next;
    }
    Py_RETURN_NONE;
}

/* record(arguments, things, tensors, outputs): all tuples. Returns whether the next call with these arguments can be
 * answered. Guards are to be evaluated *after* it, so that a change in between is not missed; `forget` if they fail. */
static PyObject *memo_record(Memo *self, PyObject *args)
{
    PyObject *arguments, *things, *tensors, *outputs;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyTuple_Type, &arguments, &PyTuple_Type, &things, &PyTuple_Type, &tensors,
                          &PyTuple_Type, &outputs))
        return NULL;
    if (self->records > 16 && self->records > self->hits / 2) /* what it watches changes all the time */
        Py_RETURN_FALSE;
    self->records++;
    Py_ssize_t count = PyTuple_GET_SIZE(arguments), loose = count - self->roots, total = 0;
    Py_ssize_t most = self->roots > 0 ? MOST_VARIANTS : MOST_SHAPES;
    Variant *before = NULL, *v = PyMem_Calloc(1, sizeof(Variant));
    if (v == NULL)
        return PyErr_NoMemory();
    for (Variant **at = &self->variants; *at != NULL;) { /* drop what these arguments replace, and the oldest */
        Variant *old = *at;
        int same = self->roots && same_roots(old, self->roots, &PyTuple_GET_ITEM(arguments, 0), count);
        if (same || ++total >= most) {
            *at = old->next;
            if (same && before == NULL)
                before = old;
            else
                free_variant(old);
        } else
            at = &old->next;
    }
    v->arguments = count;
    v->things = PyTuple_GET_SIZE(things);
    v->tensors = loose + PyTuple_GET_SIZE(tensors);
    v->outputs = PyTuple_GET_SIZE(outputs);
    v->root = PyMem_Calloc(self->roots + 1, sizeof(PyObject *));
    v->thing = PyMem_Calloc(v->things + 1, sizeof(Thing));
    v->tensor = PyMem_Calloc(v->tensors + 1, sizeof(Tensor));
    v->output = PyMem_Calloc(v->outputs + 1, sizeof(PyObject *));
    int good = v->root != NULL && v->thing != NULL && v->tensor != NULL && v->output != NULL && loose >= 0;
    for (Py_ssize_t i = 0; good && i < self->roots; i++)
        v->root[i] = PyTuple_GET_ITEM(arguments, i);
    for (Py_ssize_t i = 0; good && i < v->things; i++)
        good = describe_thing(PyTuple_GET_ITEM(things, i), &v->thing[i],
                              before != NULL && before->things == v->things ? &before->thing[i] : NULL,
                              i < PyTuple_GET_SIZE(self->keys) ? PyTuple_GET_ITEM(self->keys, i) : Py_None);
    if (before != NULL)
        free_variant(before);
    for (Py_ssize_t i = 0; good && i < v->tensors; i++) {
        PyObject *t = i < loose ? PyTuple_GET_ITEM(arguments, self->roots + i) : PyTuple_GET_ITEM(tensors, i - loose);
        v->tensor[i].object = t;
        good = tensor_facts(t, &v->tensor[i].facts);
    }
    for (Py_ssize_t i = 0; good && i < v->outputs; i++)
        v->output[i] = PyTuple_GET_ITEM(outputs, i);
    if (!good) {
        free_variant(v);
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    v->next = self->variants;
    self->variants = v;
    Py_RETURN_TRUE;
}

static PyObject *memo_forget(Memo *self, PyObject *unused)
{
    forget(self);
    Py_RETURN_NONE;
}

static PyObject *memo_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    Py_ssize_t roots;
    PyObject *keys;
    if (!PyArg_ParseTuple(args, "nO!", &roots, &PyTuple_Type, &keys))
        return NULL;
    Memo *self = (Memo *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->call = memo_call;
        self->roots = roots;
        self->keys = Py_NewRef(keys);
    }
    return (PyObject *)self;
}

static void memo_free(PyObject *self)
{
    forget((Memo *)self);
    Py_XDECREF(((Memo *)self)->keys);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef memo_methods[] = {
    {"record", (PyCFunction)memo_record, METH_VARARGS, "record(arguments, things, tensors, outputs) -> whether it can"},
    {"forget", (PyCFunction)memo_forget, METH_NOARGS, "Answer None until the next `record`."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject memo_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "minicompile.Memo",
    .tp_basicsize = sizeof(Memo),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Memo(roots, keys): memo(*arguments) -> the outputs recorded, or None when something may have changed",
    .tp_new = memo_new,
    .tp_dealloc = memo_free,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Memo, call),
    .tp_methods = memo_methods,
};

/* The offset of the word `wanted` in memory from `start` on, or -1. */
static Py_ssize_t find_word(const void *start, Py_ssize_t size, uint64_t wanted)
{
    for (Py_ssize_t at = 0; at < size; at += sizeof(uint64_t))
        if (*(const uint64_t *)((const char *)start + at) == wanted)
            return at;
    return -1;
}

/* setup(tensor classes, addresses of the functions, [(tensor, address of its TensorImpl, its dispatch keys), ...]) -> bool
 * False: the examples are not laid out in one way, and no tensor will be known. */
static PyObject *setup(PyObject *self, PyObject *args)
{
    PyObject *types, *list;
    unsigned long long f[8], impl, keys;
    if (!PyArg_ParseTuple(args, "O!(KKKKKKKK)O!", &PyTuple_Type, &types, &f[0], &f[1], &f[2], &f[3], &f[4], &f[5], &f[6],
                          &f[7], &PyList_Type, &list))
        return NULL;
    Py_CLEAR(plain_types);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *tensor;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "OKK", &tensor, &impl, &keys))
            return NULL;
        Py_ssize_t object_at = find_word(tensor, Py_TYPE(tensor)->tp_basicsize, impl);
        Py_ssize_t field_at = object_at < 0 ? -1 : find_word((void *)(uintptr_t)impl, MOST_OF_IMPL, keys);
        if (field_at < 0 || (i > 0 && (object_at != impl_at || field_at != keys_at)))
            Py_RETURN_FALSE;
        impl_at = object_at, keys_at = field_at;
    }
    ask.dim = (void *)(uintptr_t)f[0], ask.sizes = (void *)(uintptr_t)f[1], ask.strides = (void *)(uintptr_t)f[2];
    ask.dtype = (void *)(uintptr_t)f[3], ask.device_type = (void *)(uintptr_t)f[4];
    ask.device_index = (void *)(uintptr_t)f[5], ask.layout = (void *)(uintptr_t)f[6];
    ask.requires_grad = (void *)(uintptr_t)f[7];
    plain_types = Py_NewRef(types);
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "Tell what a tensor is."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "unchanged", "Have the objects behind guards changed?", -1, methods};

PyMODINIT_FUNC PyInit_unchanged(void)
{
    if (PyType_Ready(&memo_type) < 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    if (m == NULL || PyModule_AddObjectRef(m, "Memo", (PyObject *)&memo_type) < 0)
        return NULL;
    return m;
}
