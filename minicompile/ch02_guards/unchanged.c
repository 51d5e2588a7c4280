/* "Nothing that the guards looked at has changed since they last held": one C call instead of a thousand guards.
 *
 * A Memo remembers calls for which all guards of some kind held. It is called with the same arguments as those guards
 * and answers a tuple when it can prove that they would hold again, None when it cannot: then the guards are evaluated.
 * So it may say None too often, never a tuple too often.
 *
 * A *place* is where the program holds an object: an argument, a key of a dict, an index of a tuple. The compiler numbers
 * the places that guards read, arguments first, and says which *things* lie there and what matters of each:
 *
 *     OBJECT    its class, and the values at some keys of its `__dict__`
 *     DICT      its class, which is dict itself, and the values at some keys
 *     ALL       a dict again, of which nothing may have changed
 *     TUPLE     its class, length and some items
 *     FUNCTION  its code, its defaults and those of keyword-only arguments
 *     CLASS     its version, which CPython changes with every write to it or to a base; what a search for some names finds in
 *               it, or only of which type that is, and some of its bases
 *     LIST      its class, length and some items
 *     HOOKS     the two dicts of hooks of a tensor, or that there are none
 *
 * Those values are the next places. Of a tensor its metadata matters (`Facts`), or that it has no gradient. Classes and
 * functions are not read from the program but from weak references, whose places follow the arguments.
 *
 * The proof takes the things in order. An argument that leads to things must have the address that it had, and a reference
 * be alive. Of each dict, either the number is the one remembered, which CPython gives it at every write and gives to no
 * other: then its places hold what they held, and a tuple there is the tuple that it was. Or each place is read again, and
 * must hold the same address, as it is done with the places of what has no number: a list, a function, a tensor, a tuple
 * that is an argument. A thing comes after the thing that holds it (`plan_thing` sees to it). Hence:
 *
 *   - It reads no dead object. All pointers are borrowed, but when the turn of a thing comes, something alive has been
 *     found to hold it, and nobody else has run since: the proof allocates no memory, so that no garbage is collected (in
 *     3.11, making a dict or a tuple may run a finaliser), calls no Python, and keeps the GIL.
 *   - It believes no stale value. Another object may have the address of one that died. All that guards know of a thing or
 *     a tensor is compared again, so another that agrees will do. Where they know the object itself (a function, a number)
 *     the place is `same`: a weak reference tells the object from later ones, and what takes none, such as a number, is
 *     kept alive.
 *
 * The key of an ALL may be what lies at another place, such as the parameter to which an optimizer has a state. The dict has
 * its number, so it still holds that key alive, and what has the key's address is the key.
 *
 * A program writes to its classes, too (a counter of calls). When the version of a class is another, each name that guards have
 * searched for is searched again, and its bases are compared. An object of such a class is still one, and where its attributes
 * are is known if the class has no `__dict__` and no `__getattribute__` of its own. A class of which no names are known, that of
 * the methods of tensors, has to have its version.
 *
 * At a place that is `movable` another address will do, too: for a list of losses or a tensor that each call makes anew, all
 * that guards know is compared anyway. And of a dim that is `free` guards know that its size is above 1.
 */
#define PY_SSIZE_T_CLEAN
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
#define Py_BUILD_CORE_MODULE
#include <Python.h>
#include <dlfcn.h>
#include <internal/pycore_dict.h>
#include <math.h>
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
    int32_t (*data_ptr)(Handle, void **);
    _Bool (*requires_grad)(const void *impl);
    Handle (*grad)(const void *impl);
    void (*bump_version)(Handle);
} Questions;

static Questions ask;
static PyObject *plain_types = NULL; /* tuple of tensor classes without behaviour of their own; NULL: no tensor is known */
static Py_ssize_t impl_at, keys_at;  /* offsets in bytes: in the Python object, in the TensorImpl */
static Py_ssize_t hooks_at[2];       /* in the Python object: dicts of hooks on the gradient, and of those called when it has arrived */
static const void *no_tensor;        /* the TensorImpl of a gradient that is not there */
static uint64_t plain_keys;          /* the dispatch keys of an ordinary tensor on the CPU */
enum { FLOAT32 = 6, FLOAT64 = 7 };   /* dtypes, as PyTorch numbers them */
static uint64_t with_version;        /* the dispatch key of a tensor that has a version, which those of inference mode have not */

typedef struct {
    PyTypeObject *type;
    uint64_t keys;
    int64_t ndim, sizes[2 * MOST_DIMS];
    int32_t dtype, device_type, device_index;
    _Bool requires_grad;
    unsigned int free; /* a bit for each dim of which any size above 1 will do; the tensor is contiguous then */
} Facts;

static inline Handle handle_of(PyObject *t) { return (Handle)((char *)t + impl_at); }
static inline uint64_t keys_of(Handle h) { return *(const uint64_t *)((const char *)*h + keys_at); }

static inline int is_plain(PyObject *t)
{
    for (Py_ssize_t i = 0; plain_types != NULL && i < PyTuple_GET_SIZE(plain_types); i++)
        if ((PyObject *)Py_TYPE(t) == PyTuple_GET_ITEM(plain_types, i))
            return 1;
    return 0;
}

/* 1 and the facts, or 0 when this tensor cannot be described by them. */
static int tensor_facts(PyObject *t, Facts *facts)
{
    int64_t *sizes, *strides;
    int32_t layout;
    if (!is_plain(t))
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
    int64_t dense = 1; /* the stride of a contiguous tensor */
    for (int64_t i = ndim - 1; i >= 0; dense *= sizes[i--])
        if ((facts->free >> i & 1 ? sizes[i] < 2 : sizes[i] != facts->sizes[i]) ||
            (facts->free ? sizes[i] != 1 && strides[i] != dense : strides[i] != facts->sizes[ndim + i]))
            return 0;
    return 1;
}

static inline int is_bare(PyObject *t) { return is_plain(t) && *ask.grad(*handle_of(t)) == no_tensor; }

/* ---- versions --------------------------------------------------------------------------------------------------- */

#define DICT_VERSION(d) (((PyDictObject *)(d))->ma_version_tag)

PyAPI_FUNC(PyObject *) _PyType_Lookup(PyTypeObject *, PyObject *);

/* 0 when the class has none (it was changed very often). */
static unsigned int type_version(PyTypeObject *type)
{
    static PyObject *name = NULL;
    if (type->tp_version_tag == 0 && (name != NULL || (name = PyUnicode_InternFromString("__class__")) != NULL))
        _PyType_Lookup(type, name); /* gives it one */
    return type->tp_version_tag;
}

/* The object's own dict, borrowed. No dict, though perhaps not NULL, while it keeps its attributes in itself; reading
 * `__dict__` would then make one. In 3.13 it may have a dict and yet keep them, and writing an attribute does not change
 * the dict's number. */
static inline PyObject *dict_of(PyObject *object)
{
    if (!PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_MANAGED_DICT)) {
        PyObject **at = _PyObject_GetDictPtr(object);
        return at == NULL ? NULL : *at;
    }
#if PY_VERSION_HEX >= 0x030D0000
    if (PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_INLINE_VALUES) && ((PyDictValues *)(object + 1))->valid)
        return NULL;
#endif
    return ((PyObject **)object)[-3];
}

/* The same after it has moved its attributes into its dict; NULL if `object.__dict__` is not that dict: a class may have
 * ideas of its own. In 3.13 they move when the object gets another dict, which is taken back at once. May run Python. */
static PyObject *settled_dict(PyObject *object)
{
    PyObject *name = PyUnicode_InternFromString("__dict__"), *dict = PyObject_GenericGetDict(object, NULL), *other, *seen;
    if (name != NULL && dict != NULL && dict_of(object) != dict && (other = PyDict_New()) != NULL) {
        if (PyObject_GenericSetAttr(object, name, other) == 0)
            PyObject_GenericSetAttr(object, name, dict);
        Py_DECREF(other);
    }
    seen = name == NULL ? NULL : PyObject_GetAttr(object, name);
    Py_XDECREF(name);
    Py_XDECREF(dict);
    Py_XDECREF(seen); /* before the last look */
    PyErr_Clear();
    return seen == dict_of(object) ? seen : NULL;
}

/* ---- things ----------------------------------------------------------------------------------------------------- */

enum { OBJECT, DICT, ALL, TUPLE, FUNCTION, CLASS, LIST, HOOKS };

typedef struct { int kind, place, first, end; } Plan; /* a thing: where it lies; its own places are first to end - 1 */
typedef struct {         /* where a place is in its holder */
    PyObject *name;      /* of a dict: the key, or NULL */
    int at;              /* then the place where the key is found */
    Py_ssize_t offset;   /* of anything else */
} Key;

typedef struct {
    PyObject *object;
    PyTypeObject *type;
    unsigned int type_version, kind;
    PyObject *dict;   /* of an OBJECT, unless only its class matters; a dict itself */
    uint64_t version; /* of the dict, or of a CLASS; the length of a tuple or list */
} Thing;

/* A call for which the guards held. */
typedef struct Variant {
    struct Variant *next;
    Thing *thing;
    Facts *facts;      /* of each tensor */
    PyObject **held;   /* at each place, or NULL for nothing */
    PyObject **keeper; /* for a place that is `same` a reference to it */
} Variant;

static inline Py_ssize_t item_at(Py_ssize_t i) { return offsetof(PyTupleObject, ob_item) + i * sizeof(PyObject *); }

static const Py_ssize_t part_of_function[] = {offsetof(PyFunctionObject, func_code),
                                              offsetof(PyFunctionObject, func_defaults),
                                              offsetof(PyFunctionObject, func_kwdefaults)};

enum { OF_ANY_VALUE = -1, BASES = -2 }; /* the `offset` of a name in a class of which the type matters; `at` is the number of a base */

/* What is at a place. It calls no Python: in a dict that has only names as keys, names are compared with names. */
static inline PyObject *look(int kind, PyObject *holder, const Key *key)
{
    if (kind == CLASS && key->offset == BASES) {
        PyObject *bases = ((PyTypeObject *)holder)->tp_mro;
        return bases != NULL && key->at < PyTuple_GET_SIZE(bases) ? PyTuple_GET_ITEM(bases, key->at) : NULL;
    }
    if (kind == CLASS)
        return _PyType_Lookup((PyTypeObject *)holder, key->name);
    if (kind < TUPLE)
        return PyDict_GetItemWithError(holder, key->name);
    return *(PyObject **)((kind == LIST ? (char *)((PyListObject *)holder)->ob_item : (char *)holder) + key->offset);
}

static inline int has_only_names(PyObject *dict) { return DK_IS_UNICODE(((PyDictObject *)dict)->ma_keys); }

/* Whether the items of an object are those of the dict that it is; whole: also its length and order. An OrderedDict has an
 * order of its own, which changes no number, unless it is empty. A class derived from dict reads items through a slot of its
 * own, also where it has no method for that. */
static int is_like_dict(PyObject *object, int whole)
{
    static PyObject *name = NULL;
    PyTypeObject *a = Py_TYPE(object), *b = &PyDict_Type;
    if (PyODict_CheckExact(object) && whole)
        return PyDict_GET_SIZE(object) == 0;
    return PyDict_Check(object) && (name != NULL || (name = PyUnicode_InternFromString("__getitem__")) != NULL) &&
           _PyType_Lookup(a, name) == _PyType_Lookup(b, name) &&
           (!whole || (a->tp_iter == b->tp_iter && a->tp_as_mapping->mp_length == b->tp_as_mapping->mp_length &&
                       (a->tp_as_number == NULL || a->tp_as_number->nb_bool == NULL)));
}

/* Read the thing, and what lies at its places: new references. 0 when a memo cannot vouch for it. */
static int describe(const Plan *plan, const Key *key, PyObject **held, Thing *thing)
{
    PyObject *object = held[plan->place], *from = object;
    if (object == NULL || ((thing->type_version = type_version(Py_TYPE(object))) == 0 && plan->kind != OBJECT))
        return 0;
    if (plan->kind == OBJECT && plan->first < plan->end) {
        if ((from = settled_dict(object)) == NULL) /* from here on no Python runs */
            return 0;
    }
    thing->object = object, thing->kind = plan->kind, thing->type = Py_TYPE(object);
    if (plan->kind == CLASS && (!PyType_Check(object) || ((thing->version = type_version((PyTypeObject *)object)) == 0 &&
                                                          plan->first == plan->end)))
        return 0;
    if (plan->kind == FUNCTION && !PyFunction_Check(object))
        return 0;
    if (plan->kind == HOOKS && !is_plain(object))
        return 0;
    if (plan->kind == LIST) {
        if (!PyList_CheckExact(object))
            return 0;
        thing->version = (uint64_t)Py_SIZE(object);
    } else if (plan->kind == TUPLE) {
        if (!PyTuple_Check(object) || thing->type->tp_as_mapping->mp_subscript != PyTuple_Type.tp_as_mapping->mp_subscript)
            return 0;
        thing->version = (uint64_t)Py_SIZE(object);
    } else if (plan->kind < TUPLE && (plan->kind != OBJECT || plan->first < plan->end)) {
        if (!is_like_dict(from, plan->kind == ALL) || !(plan->kind == ALL || has_only_names(from)))
            return 0;
        thing->dict = from;
        thing->version = DICT_VERSION(from); /* before what is read: where keys are no names, a look may run Python */
    }
    for (int i = plan->first; i < plan->end; i++) {
        if ((plan->kind == TUPLE && key[i].offset >= item_at(Py_SIZE(object))) ||
            (plan->kind == LIST && key[i].offset >= Py_SIZE(object) * (Py_ssize_t)sizeof(PyObject *)))
            return 0;
        Key one = key[i];
        if (plan->kind < TUPLE && one.name == NULL && (one.name = held[one.at]) == NULL) /* it is found later */
            return 0;
        held[i] = Py_XNewRef(look(plan->kind, from, &one));
        if (plan->kind == CLASS && key[i].offset == OF_ANY_VALUE && held[i] == NULL)
            return 0;
    }
    return 1;
}

static inline int is_kept(PyObject *value, PyObject *keeper)
{
    return keeper == NULL || keeper == value || (PyWeakref_CheckRef(keeper) && PyWeakref_GET_OBJECT(keeper) == value);
}

/* ---- the memo --------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *spec, *references; /* the arguments of the constructor, which keep the names of keys; to classes, functions */
    int arguments, places, things, tensors, bares, outputs, sames, movables; /* how many */
    Plan *plan;
    Key *key;                    /* of each place */
    int *tensor, *bare, *output, *same, *movable; /* places; bare: of tensors without a gradient */
    PyObject *free;                               /* of each tensor, see `Facts` */
    Py_ssize_t hits, records, refused;
    Variant *variants; /* most recently used first */
} Memo;

/* Another value lies at this place. If it may, the rest of the proof is about that one. */
static int has_moved(const Memo *self, Variant *v, int place, PyObject *value)
{
    int may = 0;
    for (int i = 0; value != NULL && i < self->movables; i++)
        may |= self->movable[i] == place;
    if (may)
        v->held[place] = value;
    for (int i = 0; may && i < self->things; i++)
        if (self->plan[i].place == place)
            v->thing[i].object = value;
    return may;
}

/* Whether these are names of the class that guards have searched for: then a CLASS among the things is proved for it. Classes come
 * after objects, of which there may be thousands, each of which is asked for. */
static int is_class_compared(const Memo *self, const Variant *v, PyTypeObject *type)
{
    for (int i = self->things - 1; i >= 0; i--)
        if (self->plan[i].kind == CLASS && self->plan[i].first < self->plan[i].end && v->thing[i].object == (PyObject *)type)
            return 1;
    return 0;
}

/* Whether objects of the class have their attributes where those of others have them. */
static int has_usual_attributes(PyTypeObject *type)
{
    static PyObject *dict = NULL, *get = NULL;
    if ((dict == NULL && (dict = PyUnicode_InternFromString("__dict__")) == NULL) ||
        (get == NULL && (get = PyUnicode_InternFromString("__getattribute__")) == NULL))
        return 0;
    PyObject *a = _PyType_Lookup(type, dict);
    return a != NULL && Py_TYPE(a) == &PyGetSetDescr_Type && _PyType_Lookup(type, get) == _PyType_Lookup(&PyBaseObject_Type, get);
}

/* compared: whether some places were, in this proof. Before that every tuple but an argument is known to be the tuple that it
 * was: a dict holds it that has its number. */
static inline int is_unchanged(const Memo *self, Variant *v, int number, int *compared)
{
    const Plan *plan = &self->plan[number];
    const Thing *thing = &v->thing[number];
    PyObject *object = thing->object, *from = object;
    uint64_t version = thing->version;
    if (Py_TYPE(object) != thing->type)
        return 0;
    if (thing->type->tp_version_tag != thing->type_version || thing->type_version == 0) {
        if (thing->kind != OBJECT || !is_class_compared(self, v, thing->type) ||
            (thing->dict != NULL && !has_usual_attributes(thing->type)))
            return 0;
    }
    if (thing->kind == CLASS) {
        if (((PyTypeObject *)object)->tp_version_tag == version && version != 0)
            return 1;
        if (plan->first == plan->end)
            return 0;
    } else if (thing->kind == TUPLE) {
        int known = !*compared && plan->place >= self->arguments;
        if (known || (uint64_t)Py_SIZE(object) != version)
            return known;
    } else if (thing->kind == LIST) {
        if ((uint64_t)Py_SIZE(object) != version)
            return 0;
    } else if (thing->kind < TUPLE) {
        if ((from = thing->dict) == NULL)
            return 1;
        if (thing->kind == OBJECT && dict_of(object) != from)
            return 0;
        if (DICT_VERSION(from) == version)
            return 1;
        if (thing->kind == ALL || !has_only_names(from))
            return 0;
    }
    for (int i = plan->first; i < plan->end; i++) {
        PyObject *value = look(thing->kind, from, &self->key[i]);
        if (thing->kind == CLASS && self->key[i].offset == OF_ANY_VALUE) {
            if (value == NULL || !is_kept((PyObject *)Py_TYPE(value), v->keeper[i]))
                return 0;
        } else if (value != v->held[i] ? !has_moved(self, v, i, value) : !is_kept(value, v->keeper[i]))
            return 0;
    }
    return *compared = 1;
}

static void free_variants(const Memo *self, Variant *v)
{
    while (v != NULL) {
        Variant *next = v->next;
        for (int i = 0; i < self->sames; i++)
            Py_CLEAR(v->keeper[self->same[i]]);
        PyMem_Free(v);
        v = next;
    }
}

static PyObject *memo_forget(Memo *self, PyObject *unused)
{
    Variant *all = self->variants;
    self->variants = NULL;
    free_variants(self, all);
    Py_RETURN_NONE;
}

/* Arguments that lead to things are compared by identity. */
static inline int same_roots(const Memo *self, const Variant *v, PyObject *const *args)
{
    return self->things == 0 || memcmp(v->held, args, self->arguments * sizeof(PyObject *)) == 0;
}

/* New numbers are learned when the whole proof has succeeded: what lies in a dict that has its number is not compared any more. */
static int holds(const Memo *self, Variant *v, PyObject *const *args)
{
    int compared = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->references); i++)
        if (PyWeakref_GET_OBJECT(PyTuple_GET_ITEM(self->references, i)) != v->held[self->arguments + i])
            return 0;
    for (int i = 0; i < self->things; i++)
        if (!is_unchanged(self, v, i, &compared))
            return 0;
    for (int i = 0; i < self->tensors; i++) {
        int at = self->tensor[i];
        if (!has_facts(at < self->arguments ? args[at] : v->held[at], &v->facts[i]))
            return 0;
    }
    for (int i = 0; i < self->bares; i++)
        if (!is_bare(v->held[self->bare[i]]))
            return 0;
    for (int i = 0; compared && i < self->things; i++) {
        Thing *thing = &v->thing[i];
        if (thing->dict != NULL)
            thing->version = DICT_VERSION(thing->dict);
        else if (thing->kind == CLASS)
            thing->version = type_version((PyTypeObject *)thing->object);
        thing->type_version = thing->type->tp_version_tag;
    }
    return 1;
}

static PyObject *memo_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Memo *self = (Memo *)object;
    if (PyVectorcall_NARGS(flags) != self->arguments || self->variants == NULL)
        Py_RETURN_NONE;
    PyObject *result = PyTuple_New(self->outputs); /* before the proof begins */
    for (Variant **at = &self->variants, *v; result != NULL && (v = *at) != NULL; at = &v->next)
        if (same_roots(self, v, args) && holds(self, v, args)) {
            *at = v->next;
            v->next = self->variants;
            self->variants = v;
            self->hits++;
            for (int i = 0; i < self->outputs; i++)
                PyTuple_SET_ITEM(result, i, Py_NewRef(v->held[self->output[i]]));
            return result;
        }
    if (result != NULL)
        Py_SETREF(result, Py_NewRef(Py_None));
    return result;
}

/* A weak reference, or to what takes none, such as a number, a strong one: guards hold it, too. */
static int keep(PyObject *value, PyObject **keeper)
{
    if (value != NULL && (*keeper = PyWeakref_NewRef(value, NULL)) == NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        *keeper = Py_NewRef(value);
    return value == NULL || *keeper != NULL;
}

/* What tells at a `same` place whether another object will do: the object, or where its type is all that matters, the type. */
static PyObject *to_be_kept(const Memo *self, const Variant *v, int place)
{
    PyObject *value = v->held[place];
    return value != NULL && self->key[place].offset == OF_ANY_VALUE ? (PyObject *)Py_TYPE(value) : value;
}

/* Read all places, from the arguments on. What is found is held meanwhile, since this may run Python. */
static Variant *describe_all(const Memo *self, PyObject *const *args)
{
    Variant *v = PyMem_Calloc(1, sizeof(Variant) + self->things * sizeof(Thing) + self->tensors * sizeof(Facts) +
                                     2 * self->places * sizeof(PyObject *));
    if (v == NULL)
        return NULL;
    v->thing = (Thing *)(v + 1);
    v->facts = (Facts *)(v->thing + self->things);
    v->held = (PyObject **)(v->facts + self->tensors);
    v->keeper = v->held + self->places;
    int good = 1;
    for (int i = 0; i < self->arguments; i++)
        v->held[i] = Py_NewRef(args[i]);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->references); i++)
        v->held[self->arguments + i] = Py_NewRef(PyWeakref_GET_OBJECT(PyTuple_GET_ITEM(self->references, i)));
    for (int i = 0; good && i < self->things; i++)
        good = describe(&self->plan[i], self->key, v->held, &v->thing[i]);
    for (int i = 0; good && i < self->tensors; i++)
        if ((good = v->held[self->tensor[i]] != NULL && tensor_facts(v->held[self->tensor[i]], &v->facts[i])))
            v->facts[i].free = self->free ? (unsigned int)PyLong_AsLong(PyTuple_GET_ITEM(self->free, i)) : 0;
    for (int i = 0; good && i < self->bares; i++)
        good = self->things > 0 && v->held[self->bare[i]] != NULL && is_bare(v->held[self->bare[i]]);
    for (int i = 0; good && i < self->outputs; i++)
        good = v->held[self->output[i]] != NULL;
    for (int i = 0; good && i < self->sames; i++)
        good = keep(to_be_kept(self, v, self->same[i]), &v->keeper[self->same[i]]);
    for (int i = 0; i < self->places; i++)
        Py_XDECREF(v->held[i]);
    PyErr_Clear();
    if (good)
        return v;
    free_variants(self, v);
    return NULL;
}

/* record(*arguments): whether the next call with these arguments can be answered. Guards are to be evaluated *after* it,
 * so that a change in between is not missed; `forget` if they fail. */
static PyObject *memo_record(Memo *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != self->arguments)
        Py_RETURN_FALSE;
    if (self->records > 16 && self->records > self->hits / 2 && ++self->refused % 16)
        Py_RETURN_FALSE; /* what it watches changes all the time, so it is tried now and then */
    self->records++;
    Variant *v = describe_all(self, args), **at = &self->variants, *old, *replaced = NULL;
    if (v == NULL)
        Py_RETURN_FALSE;
    for (int total = 1, most = self->things > 0 ? MOST_VARIANTS : MOST_SHAPES; (old = *at) != NULL;)
        if ((self->things > 0 && same_roots(self, old, args)) || ++total > most) { /* the oldest, too */
            *at = old->next;
            old->next = replaced;
            replaced = old;
        } else
            at = &old->next;
    v->next = self->variants;
    self->variants = v;
    free_variants(self, replaced);
    Py_RETURN_TRUE;
}

static void memo_free(PyObject *object)
{
    Memo *self = (Memo *)object;
    Py_DECREF(memo_forget(self, NULL));
    PyMem_Free(self->plan);
    PyMem_Free(self->key);
    PyMem_Free(self->tensor);
    PyMem_Free(self->bare);
    PyMem_Free(self->output);
    PyMem_Free(self->same);
    PyMem_Free(self->movable);
    Py_XDECREF(self->spec);
    Py_TYPE(self)->tp_free(self);
}

/* A thing, after those that were planned: (kind, place, keys). 0 unless it lies at a place of one of those. */
static int plan_thing(Memo *self, Plan *plan, PyObject *spec)
{
    PyObject *keys;
    if (!PyArg_ParseTuple(spec, "iiO!", &plan->kind, &plan->place, &PyTuple_Type, &keys))
        return 0;
    plan->first = self->places;
    plan->end = self->places += (int)PyTuple_GET_SIZE(keys);
    Key *all = PyMem_Realloc(self->key, (self->places + 1) * sizeof(Key));
    if (all == NULL)
        return 0;
    self->key = all;
    int good = plan->place >= 0 && plan->place < plan->first;
    for (int i = plan->first; good && i < plan->end; i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i - plan->first);
        long index = PyLong_CheckExact(key) ? PyLong_AsLong(key) : -1;
        if (plan->kind < TUPLE) {
            good = plan->kind == ALL || PyUnicode_CheckExact(key);
            all[i] = (Key){key, -1, 0};
            continue;
        }
        if (plan->kind == CLASS) { /* a name, a tuple of one whose type matters, or the number of a base */
            int typed = PyTuple_CheckExact(key) && PyTuple_GET_SIZE(key) == 1;
            PyObject *name = typed ? PyTuple_GET_ITEM(key, 0) : key;
            good = index >= 0 || PyUnicode_CheckExact(name);
            all[i] = index >= 0 ? (Key){NULL, (int)index, BASES} : (Key){name, -1, typed ? OF_ANY_VALUE : 0};
            continue;
        }
        good = index >= 0 && index < (plan->kind == FUNCTION ? 3 : plan->kind == HOOKS ? 2 : INT_MAX);
        all[i].offset = plan->kind == TUPLE || !good ? item_at(index) : plan->kind == LIST ? index * (Py_ssize_t)sizeof(PyObject *) :
                        plan->kind == HOOKS ? hooks_at[index] : part_of_function[index];
    }
    return good;
}

/* Take over numbers of places from `least` on. 0 unless they exist. */
static int plan_places(const Memo *self, PyObject *numbers, int least, int **places, int *count)
{
    *places = PyMem_Calloc(PyTuple_GET_SIZE(numbers) + 1, sizeof(int));
    for (*count = 0; *places != NULL && *count < PyTuple_GET_SIZE(numbers); ++*count) {
        int place = (*places)[*count] = (int)PyLong_AsLong(PyTuple_GET_ITEM(numbers, *count));
        if (place < least || place >= self->places)
            return 0;
    }
    return *places != NULL;
}

/* Pairs of a place in a dict and the place where its key is found. 0 unless nothing of that dict may change. */
static int plan_keys(Memo *self, PyObject *numbers)
{
    int *pairs, count, good = plan_places(self, numbers, 0, &pairs, &count) && count % 2 == 0;
    for (int i = 0; good && i < count; i += 2) {
        good = 0;
        for (int j = 0; j < self->things; j++)
            good |= self->plan[j].kind == ALL && pairs[i] >= self->plan[j].first && pairs[i] < self->plan[j].end;
        if (good)
            self->key[pairs[i]].name = NULL, self->key[pairs[i]].at = pairs[i + 1];
    }
    PyMem_Free(pairs);
    return good;
}

static PyObject *memo_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *references, *things, *same, *tensors, *outputs, *bare = NULL, *movable = NULL, *free = NULL, *keyed = NULL;
    int arguments, good = 1;
    if (!PyArg_ParseTuple(args, "iO!O!O!O!O!|O!O!O!O!", &arguments, &PyTuple_Type, &references, &PyTuple_Type, &things,
                          &PyTuple_Type, &same, &PyTuple_Type, &tensors, &PyTuple_Type, &outputs, &PyTuple_Type, &bare,
                          &PyTuple_Type, &movable, &PyTuple_Type, &free, &PyTuple_Type, &keyed))
        return NULL;
    Memo *self = (Memo *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = memo_call;
    self->spec = Py_NewRef(args);
    self->references = references, self->free = free;
    self->arguments = arguments, self->places = arguments + (int)PyTuple_GET_SIZE(references);
    good = arguments >= 0 && (self->key = PyMem_Calloc(self->places + 1, sizeof(Key))) != NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(references); i++)
        good = good && PyWeakref_CheckRef(PyTuple_GET_ITEM(references, i));
    for (Py_ssize_t i = 0; good && free != NULL && i < PyTuple_GET_SIZE(free); i++)
        good = PyLong_CheckExact(PyTuple_GET_ITEM(free, i)) && PyTuple_GET_SIZE(free) == PyTuple_GET_SIZE(tensors);
    good = good && (self->plan = PyMem_Calloc(PyTuple_GET_SIZE(things) + 1, sizeof(Plan))) != NULL;
    for (; good && self->things < PyTuple_GET_SIZE(things); self->things++)
        good = plan_thing(self, &self->plan[self->things], PyTuple_GET_ITEM(things, self->things));
    if (good && plan_places(self, same, arguments, &self->same, &self->sames) &&
        plan_places(self, tensors, 0, &self->tensor, &self->tensors) &&
        plan_places(self, outputs, arguments, &self->output, &self->outputs) &&
        (bare == NULL || plan_places(self, bare, 0, &self->bare, &self->bares)) &&
        (movable == NULL || plan_places(self, movable, arguments, &self->movable, &self->movables)) &&
        (keyed == NULL || plan_keys(self, keyed)))
        return (PyObject *)self;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no such place");
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef memo_methods[] = {
    {"record", (PyCFunction)(void (*)(void))memo_record, METH_FASTCALL, "record(*arguments) -> whether it can"},
    {"forget", (PyCFunction)memo_forget, METH_NOARGS, "Answer None until the next `record`."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject memo_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "minicompile.Memo",
    .tp_basicsize = sizeof(Memo),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Memo(arguments, references, things, same, tensors, outputs, bare=(), movable=(), free, keyed): memo(*arguments) -> the outputs recorded, or "
              "None when something may have changed",
    .tp_new = memo_new,
    .tp_dealloc = memo_free,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Memo, call),
    .tp_methods = memo_methods,
};

/* ---- the memory of tensors -------------------------------------------------------------------------------------- */

/* Where a tensor begins, or NULL with an exception. */
static int memory_of(PyObject *t, void **address)
{
    if (is_plain(t) && ask.data_ptr(handle_of(t), address) == 0)
        return 1;
    PyObject *found = PyObject_CallMethod(t, "data_ptr", NULL);
    *address = found == NULL ? NULL : PyLong_AsVoidPtr(found);
    Py_XDECREF(found);
    return !PyErr_Occurred();
}

/* lie_at(tensors, positions, addresses) -> whether the tensors at those positions of a list begin where they did: all lists. */
static PyObject *lie_at(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "lie_at(list, list, list)");
    if (PyList_GET_SIZE(args[1]) != PyList_GET_SIZE(args[2]))
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]) && i < PyList_GET_SIZE(args[2]); i++) {
        Py_ssize_t position = PyLong_AsSsize_t(PyList_GET_ITEM(args[1], i));
        void *before = PyLong_AsVoidPtr(PyList_GET_ITEM(args[2], i)), *address = NULL;
        if (position < 0 || position >= PyList_GET_SIZE(args[0]))
            PyErr_SetString(PyExc_IndexError, "no such tensor");
        if (PyErr_Occurred() || !memory_of(PyList_GET_ITEM(args[0], position), &address))
            return NULL;
        if (address != before)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* A 0-d tensor of floats on the CPU, which nothing is pending for: its number. */
static int number_of(PyObject *t, double *number, void **address)
{
    int64_t ndim;
    int32_t dtype, device_type;
    if (!is_plain(t) || keys_of(handle_of(t)) != plain_keys || ask.dim(handle_of(t), &ndim) || ndim != 0 ||
        ask.device_type(handle_of(t), &device_type) || device_type != 0 || ask.dtype(handle_of(t), &dtype) ||
        (dtype != FLOAT32 && dtype != FLOAT64) || ask.data_ptr(handle_of(t), address) || *address == NULL)
        return 0;
    *number = dtype == FLOAT32 ? *(float *)*address : *(double *)*address;
    return 1;
}

/* common_number(*tensors) -> the number that all of them hold, each in memory of its own; NaN if there is none, None where
 * that cannot be found out. */
static PyObject *common_number(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    double first = NAN, number;
    Py_ssize_t size = 16, good = 1;
    while (size < 2 * count)
        size *= 2;
    void *address, **seen = PyMem_Calloc(size, sizeof(void *)); /* a set: each where its address says, or behind */
    for (Py_ssize_t i = 0; seen != NULL && i < count; i++) {
        if (!number_of(args[i], &number, &address)) {
            PyMem_Free(seen);
            Py_RETURN_NONE;
        }
        first = i == 0 ? number : first;
        Py_ssize_t at = ((uintptr_t)address >> 2) % size;
        while (seen[at] != NULL && seen[at] != address)
            at = (at + 1) % size;
        good = good && seen[at] == NULL && number == first;
        seen[at] = address;
    }
    PyMem_Free(seen);
    return seen == NULL ? PyErr_NoMemory() : PyFloat_FromDouble(good ? first : NAN);
}

/* raise_versions(*tensors) -> whether it did: False, and nothing done, if one is not known to have a version. */
static PyObject *raise_versions(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (!is_plain(args[i]) || !(keys_of(handle_of(args[i])) & with_version))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++)
        ask.bump_version(handle_of(args[i]));
    Py_RETURN_TRUE;
}

static int number_in(PyObject *object, int64_t *number)
{
    int overflow = 0;
    return PyLong_CheckExact(object) && (*number = PyLong_AsLongLongAndOverflow(object, &overflow)) >= 0 && !overflow;
}

/* size_of(tensor, dim) -> int, where the tensor has this dim: `tensor.size(dim)`, half of which goes into reading its argument. */
static PyObject *size_of(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t ndim, dim, *sizes;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "size_of(tensor, dim)");
    if (is_plain(args[0]) && number_in(args[1], &dim) && !ask.dim(handle_of(args[0]), &ndim) && dim < ndim &&
        !ask.sizes(handle_of(args[0]), &sizes))
        return PyLong_FromLongLong(sizes[dim]);
    return PyObject_CallMethod(args[0], "size", "O", args[1]);
}

/* ---- new tensors ------------------------------------------------------------------------------------------------- */

/* `torch.empty_strided` for one dtype, in memory of the CPU, and a window on a tensor, as an argument of a library call: half of
 * the microsecond that each takes goes into reading its arguments. */
static int32_t (*make_empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *);
static int32_t (*make_window)(Handle, int64_t, const int64_t *, const int64_t *, int64_t, Handle *);
static int32_t (*let_go)(Handle);
static PyObject *(*as_object)(Handle); /* takes an at::Tensor by reference, and a handle is the address of one */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    int32_t dtype;
    PyObject *otherwise; /* called with the same arguments where this cannot be done, so that errors are PyTorch's */
} Maker;

/* Whether these are two tuples of equally many numbers, none of them negative. */
static int layout_in(PyObject *const *args, int64_t *sizes, int64_t *strides)
{
    if (!PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[0]) != PyTuple_GET_SIZE(args[1]) ||
        PyTuple_GET_SIZE(args[0]) > MOST_DIMS)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); i++)
        if (!number_in(PyTuple_GET_ITEM(args[0], i), &sizes[i]) || !number_in(PyTuple_GET_ITEM(args[1], i), &strides[i]))
            return 0;
    return 1;
}

static PyObject *wrapped(Handle made)
{
    PyObject *result = as_object(made);
    let_go(made);
    return result;
}

static PyObject *empty_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Maker *self = (Maker *)object;
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS];
    Handle made;
    if (names == NULL && PyVectorcall_NARGS(flags) == 2 && layout_in(args, sizes, strides) &&
        !make_empty(PyTuple_GET_SIZE(args[0]), sizes, strides, self->dtype, 0, 0, &made))
        return wrapped(made);
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
}

static PyObject *window_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS], offset;
    int32_t layout;
    Handle made;
    if (names == NULL && PyVectorcall_NARGS(flags) == 4 && is_plain(args[0]) && !ask.layout(handle_of(args[0]), &layout) &&
        layout == 0 && layout_in(args + 1, sizes, strides) && number_in(args[3], &offset) &&
        !make_window(handle_of(args[0]), PyTuple_GET_SIZE(args[1]), sizes, strides, offset, &made))
        return wrapped(made);
    return PyObject_Vectorcall(((Maker *)object)->otherwise, args, flags, names);
}

static PyObject *maker_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *otherwise, *example = NULL;
    int32_t dtype = 0;
    if (!PyArg_ParseTuple(args, "O|O", &otherwise, &example))
        return NULL;
    if (make_empty == NULL || (example != NULL && (!is_plain(example) || ask.dtype(handle_of(example), &dtype))))
        return PyErr_Format(PyExc_TypeError, "Maker(function[, tensor]), after setup_makers");
    Maker *self = (Maker *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->call = example == NULL ? window_call : empty_call, self->dtype = dtype, self->otherwise = Py_NewRef(otherwise);
    return (PyObject *)self;
}

static void maker_free(PyObject *object)
{
    Py_XDECREF(((Maker *)object)->otherwise);
    Py_TYPE(object)->tp_free(object);
}

static PyTypeObject maker_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "minicompile.Maker",
    .tp_basicsize = sizeof(Maker),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Maker(otherwise, tensor): empty(sizes, strides) -> a tensor of that dtype on the CPU, or otherwise(sizes, strides)\n"
              "Maker(otherwise): window(tensor, sizes, strides, offset) -> a tensor in its memory that is no view to autograd, "
              "which begins offset elements after it, or otherwise(...)",
    .tp_new = maker_new,
    .tp_dealloc = maker_free,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Maker, call),
};

/* setup_makers(addresses of four functions) */
static PyObject *setup_makers(PyObject *self, PyObject *args)
{
    unsigned long long empty, window, free, wrap;
    if (!PyArg_ParseTuple(args, "KKKK", &empty, &window, &free, &wrap))
        return NULL;
    make_empty = (void *)(uintptr_t)empty, make_window = (void *)(uintptr_t)window;
    let_go = (void *)(uintptr_t)free, as_object = (void *)(uintptr_t)wrap;
    Py_RETURN_NONE;
}

/* The offset of the word `wanted` in memory from `start` on, or -1. */
static Py_ssize_t find_word(const void *start, Py_ssize_t size, uint64_t wanted)
{
    for (Py_ssize_t at = 0; at < size; at += sizeof(uint64_t))
        if (*(const uint64_t *)((const char *)start + at) == wanted)
            return at;
    return -1;
}

/* ---- who holds a tensor ------------------------------------------------------------------------------------------ */

/* All of a tensor that its holders can change or add to: the object's references, weak references and attributes, those of
 * the TensorImpl and of its memory in C++, and what the tensor is. */
typedef struct {
    Facts facts;
    void *address;
    const void *weak, *hooks[2], *gradient, *dict;
    Py_ssize_t references, attributes;
    uint32_t of_tensor;
} Holders;

static Py_ssize_t memory_at = -1;                 /* in the TensorImpl: its StorageImpl; -1: not known */
enum { COUNT_AT = sizeof(void *) };               /* in both: how many hold it, after the table of virtual functions */

static inline uint32_t count_in(const void *impl) { return *(const uint32_t *)((const char *)impl + COUNT_AT); }
static inline void *memory_in(const void *impl) { return *(void *const *)((const char *)impl + memory_at); }

/* storage_of(tensor) -> the address of its StorageImpl, or None. Asking in Python makes an object that is a holder, too. */
static PyObject *storage_of(PyObject *self, PyObject *t)
{
    int64_t ndim;
    if (memory_at < 0 || !is_plain(t) || ask.dim(handle_of(t), &ndim))
        Py_RETURN_NONE;
    return PyLong_FromVoidPtr(memory_in(*handle_of(t)));
}

/* setup_holders([(address of a TensorImpl, its count, address of its StorageImpl, its count), ...]) -> bool
 * False: the counts are not where they are expected, and nothing will be known of holders. */
static PyObject *setup_holders(PyObject *self, PyObject *list)
{
    memory_at = -1;
    for (Py_ssize_t i = 0, at; PyList_Check(list) && i < PyList_GET_SIZE(list); i++) {
        unsigned long long impl, of_tensor, memory, of_memory;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "KKKK", &impl, &of_tensor, &memory, &of_memory))
            return NULL;
        at = find_word((void *)(uintptr_t)impl, MOST_OF_IMPL, memory);
        if (at < 0 || (i > 0 && at != memory_at) || count_in((void *)(uintptr_t)impl) != of_tensor ||
            count_in((void *)(uintptr_t)memory) != of_memory) {
            memory_at = -1;
            Py_RETURN_FALSE;
        }
        memory_at = at;
    }
    return PyBool_FromLong(memory_at >= 0);
}

/* holders(list of tensors) -> bytes that stay the same as long as nobody takes hold of one or lets go of one; None if that
 * cannot be found out, or if the memory of one has another holder. (That may be a Python object for the memory, which
 * PyTorch keeps: it counts once, however many refer to it.) The list itself is a holder of tensors. */
static PyObject *holders(PyObject *self, PyObject *list)
{
    if (!PyList_Check(list))
        return PyErr_Format(PyExc_TypeError, "holders(list)");
    PyObject *result = PyBytes_FromStringAndSize(NULL, PyList_GET_SIZE(list) * sizeof(Holders));
    for (Py_ssize_t i = 0; result != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *t = PyList_GET_ITEM(list, i), *dict;
        Holders *h = (Holders *)PyBytes_AS_STRING(result) + i;
        memset(h, 0, sizeof(Holders));
        if (memory_at < 0 || !tensor_facts(t, &h->facts) || ask.data_ptr(handle_of(t), &h->address) ||
            memory_in(*handle_of(t)) == NULL || count_in(memory_in(*handle_of(t))) != 1) {
            Py_DECREF(result);
            Py_RETURN_NONE;
        }
        const void *impl = *handle_of(t);
        h->references = Py_REFCNT(t), h->of_tensor = count_in(impl);
        h->weak = *(void **)((char *)t + Py_TYPE(t)->tp_weaklistoffset), h->gradient = *ask.grad(impl);
        h->hooks[0] = *(void **)((char *)t + hooks_at[0]), h->hooks[1] = *(void **)((char *)t + hooks_at[1]);
        h->dict = dict = dict_of(t), h->attributes = dict == NULL ? 0 : PyDict_GET_SIZE(dict);
    }
    return result;
}

/* A range of memory that some argument of a function occupies. */
typedef struct {
    uintptr_t start, end;
    Py_ssize_t position, bytes, item; /* which argument; from its first byte to the last, or -1: to be computed, of items this large */
    int is_written, of_module;
} Span;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Py_ssize_t count;
    int are_apart; /* as they were last seen */
    Span *span;
    Span **order; /* by address */
} Spans;

static int by_address(const void *a, const void *b)
{
    uintptr_t x = (*(Span *const *)a)->start, y = (*(Span *const *)b)->start;
    return x < y ? -1 : x > y;
}

/* Where few have moved, the order is almost the one of before. */
static void sort_spans(Spans *self, Py_ssize_t moved)
{
    if (moved > 16) {
        qsort(self->order, self->count, sizeof(Span *), by_address);
        return;
    }
    for (Py_ssize_t i = 1; i < self->count; i++) {
        Span *span = self->order[i];
        Py_ssize_t k = i;
        for (; k > 0 && self->order[k - 1]->start > span->start; k--)
            self->order[k] = self->order[k - 1];
        self->order[k] = span;
    }
}

static int harm_each_other(const Spans *self)
{
    uintptr_t farthest[2][2] = {{0, 0}, {0, 0}};
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Span *s = self->order[i];
        if (s->start == s->end)
            continue;
        for (int of_module = 0; of_module < (s->of_module ? 1 : 2); of_module++)
            if (s->start < farthest[of_module][!s->is_written])
                return 1;
        for (int only_written = 0; only_written < (s->is_written ? 2 : 1); only_written++)
            if (farthest[s->of_module][only_written] < s->end)
                farthest[s->of_module][only_written] = s->end;
    }
    return 0;
}

static PyObject *spans_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Spans *self = (Spans *)object;
    Py_ssize_t moved = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Span *s = &self->span[i];
        int64_t ndim, *sizes, *strides;
        void *address;
        if (s->position >= PyVectorcall_NARGS(flags) || !is_plain(args[s->position]))
            goto unknown;
        Handle h = handle_of(args[s->position]);
        if (ask.data_ptr(h, &address))
            goto unknown;
        Py_ssize_t bytes = s->bytes;
        if (bytes < 0) {
            if (ask.dim(h, &ndim) || ask.sizes(h, &sizes) || ask.strides(h, &strides))
                goto unknown;
            bytes = s->item;
            for (int64_t d = 0; d < ndim; d++)
                bytes = sizes[d] == 0 || bytes == 0 ? 0 : bytes + (sizes[d] - 1) * strides[d] * s->item;
        }
        if (s->start != (uintptr_t)address || s->end != s->start + bytes) {
            s->start = (uintptr_t)address, s->end = s->start + bytes;
            moved++;
        }
    }
    if (moved > 0 || !self->are_apart) {
        sort_spans(self, moved);
        self->are_apart = !harm_each_other(self);
    }
    return PyBool_FromLong(self->are_apart);
unknown:
    self->are_apart = 0;
    Py_RETURN_NONE;
}

static PyObject *spans_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *list;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list))
        return NULL;
    Spans *self = (Spans *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = spans_call;
    Py_ssize_t count = PyList_GET_SIZE(list);
    self->span = PyMem_Calloc(count + 1, sizeof(Span));
    self->order = PyMem_Calloc(count + 1, sizeof(Span *));
    for (; self->span != NULL && self->order != NULL && self->count < count; self->count++) {
        Span *s = self->order[self->count] = &self->span[self->count];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, self->count), "nnnpp", &s->position, &s->bytes, &s->item, &s->is_written,
                              &s->of_module))
            break;
    }
    if (self->count == count && self->order != NULL)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static void spans_free(PyObject *object)
{
    PyMem_Free(((Spans *)object)->span);
    PyMem_Free(((Spans *)object)->order);
    Py_TYPE(object)->tp_free(object);
}

static PyTypeObject spans_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "minicompile.Spans",
    .tp_basicsize = sizeof(Spans),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Spans([(position, bytes or -1, bytes of an element, is it written, is it of a module), ...]): spans(*arguments) -> "
              "whether `backends.harm_each_other` finds no harm in where they are; None when that cannot be found out",
    .tp_new = spans_new,
    .tp_dealloc = spans_free,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Spans, call),
};

/* ---- the state of the library ----------------------------------------------------------------------------------- */

/* Whether gradients are recorded, and the other states that every call is guarded for. Each has a function that costs Python 30
 * nanoseconds and C one or two. Autocast and the transforms of torch.func, like all that changes how every operator of a thread
 * is dispatched, are bits of two words of the thread. They are found by name, in each thread anew. */
typedef struct {
    uint64_t keys[2]; /* dispatch keys that operators of this thread have in addition, and those they have not */
    int64_t function_modes, dispatch_modes;
    int8_t default_dtype, no_functions; /* of PyTorch, and whether `__torch_function__` is off */
    _Bool records, inference, deterministic;
} State;

static struct {
    _Bool (*records)(void);
    _Bool (*inference)(void);
    int8_t (*default_dtype)(void);
    const void *(*context)(void);
    _Bool (*deterministic)(const void *);
    int8_t (*no_functions)(void);
    int64_t (*function_modes)(void);
    int64_t (*dispatch_modes)(void);
} of_library;
static void *library = NULL; /* where the words of a thread are found */

/* The two words of this thread, or NULL. */
static uint64_t *thread_keys(void)
{
    static _Thread_local uint64_t *keys = NULL;
    if (keys == NULL && library != NULL)
        keys = dlsym(library, "_ZN3c104impl26raw_local_dispatch_key_setE");
    return library == NULL ? NULL : keys;
}

static int read_state(State *state)
{
    memset(state, 0, sizeof(State));
    const uint64_t *keys = thread_keys();
    if (keys == NULL)
        return 0;
    memcpy(state->keys, keys, sizeof(state->keys));
    state->function_modes = of_library.function_modes(), state->dispatch_modes = of_library.dispatch_modes();
    state->default_dtype = of_library.default_dtype(), state->no_functions = of_library.no_functions();
    state->records = of_library.records(), state->inference = of_library.inference();
    state->deterministic = of_library.deterministic(of_library.context());
    return 1;
}

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    int known;
    State state;
} StateMemo;

static PyObject *state_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    StateMemo *self = (StateMemo *)object;
    State now;
    int found = read_state(&now);
    if (PyVectorcall_NARGS(flags) == 0) {
        if (found && self->known && memcmp(&now, &self->state, sizeof(State)) == 0)
            Py_RETURN_NONE;
        return PyBytes_FromStringAndSize((char *)&now, sizeof(State));
    }
    if (found && PyBytes_Check(args[0]) && PyBytes_GET_SIZE(args[0]) == sizeof(State) &&
        memcmp(&now, PyBytes_AS_STRING(args[0]), sizeof(State)) == 0)
        self->known = 1, self->state = now;
    Py_RETURN_NONE;
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    StateMemo *self = (StateMemo *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->call = state_call;
    return (PyObject *)self;
}

static PyTypeObject state_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "minicompile.State",
    .tp_basicsize = sizeof(StateMemo),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "State(): state() -> None if the state of the library is the one remembered, else bytes that tell what it is; "
              "state(bytes) remembers that, if it is still so",
    .tp_new = state_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(StateMemo, call),
};

/* setup_state(handle of the library, or 0: nothing will be known, addresses of the functions) */
static PyObject *setup_state(PyObject *self, PyObject *args)
{
    unsigned long long handle, f[8];
    if (!PyArg_ParseTuple(args, "K(KKKKKKKK)", &handle, &f[0], &f[1], &f[2], &f[3], &f[4], &f[5], &f[6], &f[7]))
        return NULL;
    of_library.records = (void *)(uintptr_t)f[0], of_library.inference = (void *)(uintptr_t)f[1];
    of_library.default_dtype = (void *)(uintptr_t)f[2], of_library.context = (void *)(uintptr_t)f[3];
    of_library.deterministic = (void *)(uintptr_t)f[4], of_library.no_functions = (void *)(uintptr_t)f[5];
    of_library.function_modes = (void *)(uintptr_t)f[6], of_library.dispatch_modes = (void *)(uintptr_t)f[7];
    library = (void *)(uintptr_t)handle;
    Py_RETURN_NONE;
}

/* `torch._C._AutoDispatchBelowAutograd`, which takes a quarter of a microsecond: the keys of autograd are added to those that
 * operators of this thread have not, and those that were added are taken away again. */
static uint64_t autograd_keys = 0;

typedef struct {
    PyObject_HEAD
    uint64_t added;
} Below;

static PyObject *below_enter(PyObject *self, PyObject *unused)
{
    uint64_t *keys = thread_keys();
    if (keys == NULL)
        return PyErr_Format(PyExc_RuntimeError, "below_autograd(), after setup_below");
    ((Below *)self)->added = autograd_keys & ~keys[1];
    keys[1] |= autograd_keys;
    Py_RETURN_NONE;
}

static PyObject *below_exit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    thread_keys()[1] &= ~((Below *)self)->added;
    ((Below *)self)->added = 0;
    Py_RETURN_NONE;
}

static void below_free(PyObject *self) /* perhaps of a frame that a signal has ended between the two */
{
    if (((Below *)self)->added)
        thread_keys()[1] &= ~((Below *)self)->added;
    PyObject_Free(self);
}

static PyMethodDef below_methods[] = {
    {"__enter__", below_enter, METH_NOARGS, "Operators of this thread begin below autograd."},
    {"__exit__", (PyCFunction)(void (*)(void))below_exit, METH_FASTCALL, "And no more."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject below_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "minicompile.Below",
    .tp_basicsize = sizeof(Below),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "What below_autograd() returns, for `with`.",
    .tp_methods = below_methods,
    .tp_dealloc = below_free,
};

static PyObject *below_autograd(PyObject *self, PyObject *unused)
{
    Below *made = PyObject_New(Below, &below_type);
    if (made != NULL)
        made->added = 0;
    return (PyObject *)made;
}

/* setup_below(keys) */
static PyObject *setup_below(PyObject *self, PyObject *keys)
{
    autograd_keys = PyLong_AsUnsignedLongLong(keys);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* ---- the module ------------------------------------------------------------------------------------------------- */

/* setup(tensor classes, addresses of the functions, key of a version, [(tensor, address of its TensorImpl, its dispatch keys), ...],
 * (the two dicts of hooks of the first, a leaf on the CPU without a gradient)) -> bool
 * False: the examples are not laid out in one way, and no tensor will be known. */
static PyObject *setup(PyObject *self, PyObject *args)
{
    PyObject *types, *list, *hooks[2];
    unsigned long long f[11], impl, keys, key;
    if (!PyArg_ParseTuple(args, "O!(KKKKKKKKKKK)KO!(OO)", &PyTuple_Type, &types, &f[0], &f[1], &f[2], &f[3], &f[4], &f[5], &f[6],
                          &f[7], &f[8], &f[9], &f[10], &key, &PyList_Type, &list, &hooks[0], &hooks[1]))
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
        plain_keys = i == 0 ? keys : plain_keys;
        for (int k = 0; i == 0 && k < 2; k++)
            if ((hooks_at[k] = find_word(tensor, Py_TYPE(tensor)->tp_basicsize, (uintptr_t)hooks[k])) < 0)
                Py_RETURN_FALSE;
    }
    ask.dim = (void *)(uintptr_t)f[0], ask.sizes = (void *)(uintptr_t)f[1], ask.strides = (void *)(uintptr_t)f[2];
    ask.dtype = (void *)(uintptr_t)f[3], ask.device_type = (void *)(uintptr_t)f[4];
    ask.device_index = (void *)(uintptr_t)f[5], ask.layout = (void *)(uintptr_t)f[6];
    ask.data_ptr = (void *)(uintptr_t)f[7], ask.requires_grad = (void *)(uintptr_t)f[8];
    ask.bump_version = (void *)(uintptr_t)f[9], ask.grad = (void *)(uintptr_t)f[10], with_version = key;
    no_tensor = *ask.grad(*handle_of(PyTuple_GET_ITEM(PyList_GET_ITEM(list, 0), 0)));
    plain_types = Py_NewRef(types);
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "Tell what a tensor is."},
    {"setup_holders", setup_holders, METH_O, "Tell where counts are."},
    {"setup_state", setup_state, METH_VARARGS, "Tell who knows the state of the library."},
    {"setup_below", setup_below, METH_O, "Tell which keys are those of autograd."},
    {"below_autograd", below_autograd, METH_NOARGS, "with below_autograd(): operators of this thread are not recorded."},
    {"setup_makers", setup_makers, METH_VARARGS, "Tell how a tensor is made."},
    {"storage_of", storage_of, METH_O, "storage_of(tensor) -> address or None"},
    {"holders", holders, METH_O, "holders(list of tensors) -> bytes or None"},
    {"lie_at", (PyCFunction)(void (*)(void))lie_at, METH_FASTCALL, "lie_at(tensors, positions, addresses) -> bool"},
    {"common_number", (PyCFunction)(void (*)(void))common_number, METH_FASTCALL, "common_number(*tensors) -> float or None"},
    {"size_of", (PyCFunction)(void (*)(void))size_of, METH_FASTCALL, "size_of(tensor, dim) -> int"},
    {"raise_versions", (PyCFunction)(void (*)(void))raise_versions, METH_FASTCALL, "raise_versions(*tensors) -> whether it did"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "unchanged", "Have the objects behind guards changed?", -1, methods};

PyMODINIT_FUNC PyInit_unchanged(void)
{
    if (PyType_Ready(&memo_type) < 0 || PyType_Ready(&spans_type) < 0 || PyType_Ready(&maker_type) < 0 ||
        PyType_Ready(&state_type) < 0 || PyType_Ready(&below_type) < 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    if (m == NULL || PyModule_AddIntConstant(m, "INTERFACE", 7) < 0 || PyModule_AddObjectRef(m, "Memo", (PyObject *)&memo_type) < 0 ||
        PyModule_AddObjectRef(m, "Spans", (PyObject *)&spans_type) < 0 || PyModule_AddObjectRef(m, "Maker", (PyObject *)&maker_type) < 0 ||
        PyModule_AddObjectRef(m, "State", (PyObject *)&state_type) < 0 ||
        PyModule_AddObject(m, "memory_of", PyLong_FromVoidPtr((void *)memory_of)) < 0)
        return NULL;
    return m;
}
