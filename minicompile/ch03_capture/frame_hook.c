/* The frame hook: CPython asks us before it runs a function, and we may answer with another one.
 *
 * PEP 523 lets an extension replace the function that evaluates a frame. The frame arrives with its arguments bound
 * and its first instruction not yet run. We look up what is known about its code object:
 *
 *   nothing          ask Python (the callback) once and remember the answer
 *   skip             evaluate it as it is
 *   a target         call target(function, *arguments) instead, and return what it returns;
 *                    if that is EVALUATE (or the object given to set_missed: "no compiled version fits"), the target
 *                    declined and the frame is evaluated as it is; if it is EVALUATE_ALL, so are the frames of what it calls
 *
 * Nothing happens outside a region: `run(context, f, ...)` marks the current thread as inside one while f runs, and the
 * hook is installed in the interpreter only while some thread is. `context` is any object; the targets of a code object
 * are kept per context, so that one function can be compiled in two ways.
 *
 * Everything known about a code object hangs on the object itself and is freed with it. The collector does not see
 * those references, so nothing that is put here may lead back to the code.
 *
 * Supported: CPython 3.11, 3.12, 3.13. All that differs between them is in the block of macros below.
 */
#define PY_SSIZE_T_CLEAN
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* pthread_getattr_np */
#endif
#include <Python.h>
#include <frameobject.h>
#include <stddef.h>
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#ifdef __linux__
#include <pthread.h>
#endif

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "minicompile's frame hook knows CPython 3.11, 3.12 and 3.13"
#endif

#if PY_VERSION_HEX >= 0x030D0000
#define FRAME_CODE(f) ((PyCodeObject *)(f)->f_executable)
#define FRAME_FUNCTION(f) ((PyFunctionObject *)(f)->f_funcobj)
#elif PY_VERSION_HEX >= 0x030C0000
#define FRAME_CODE(f) ((f)->f_code)
#define FRAME_FUNCTION(f) ((PyFunctionObject *)(f)->f_funcobj)
#else
#define FRAME_CODE(f) ((f)->f_code)
#define FRAME_FUNCTION(f) ((f)->f_func)
#endif

#if PY_VERSION_HEX >= 0x030C0000
#define GET_EXTRA PyUnstable_Code_GetExtra
#define SET_EXTRA PyUnstable_Code_SetExtra
#define NEW_EXTRA_INDEX PyUnstable_Eval_RequestCodeExtraIndex
#define EVALUATOR_OWNS_FRAME 1 /* from 3.12 on, who evaluates a frame also clears it */
#define PYTHON_DEPTH_LEFT(t) (t)->py_recursion_remaining
#define C_DEPTH_LEFT(t) (t)->c_recursion_remaining
#else
#define GET_EXTRA _PyCode_GetExtra
#define SET_EXTRA _PyCode_SetExtra
#define NEW_EXTRA_INDEX _PyEval_RequestCodeExtraIndex
#define EVALUATOR_OWNS_FRAME 0 /* in 3.11 the caller does */
#define PYTHON_DEPTH_LEFT(t) (t)->recursion_remaining
#define C_DEPTH_LEFT(t) unused_depth
#endif

/* ---- what is known about a code object ---------------------------------------------------------------------- */

typedef struct Rule {
    PyObject *context;
    PyObject *target; /* NULL: evaluate as it is */
    struct Rule *next;
} Rule;

typedef struct {
    int skip; /* in every context */
    Rule *rules;
    PyObject *record; /* a dict, for Python; NULL until asked for */
} CodeState;

static Py_ssize_t extra_index = -1;
static PyObject *callback = NULL; /* callback(function, code, context) -> target, None (as it is), False (skip) */
static PyObject *evaluate = NULL, *evaluate_all = NULL; /* the singletons EVALUATE and EVALUATE_ALL */
static PyObject *missed = NULL;   /* a second one, chosen by Python */
static PyObject *on_error = NULL; /* on_error(function, arguments, exception) -> what to return instead, None: nothing */
static int regions = 0;           /* threads inside a region; guarded by the GIL */
static _Thread_local PyObject *region = NULL; /* the current context. It may outlive the call that set it: greenlets of one
                                               * thread take turns in the middle of calls, and all see this variable */

/* From here on this is the current context, a reference that is taken over. */
static void leave_for(PyObject *context)
{
    PyObject *old = region;
    region = context;
    Py_XDECREF(old);
}

static void free_rules(CodeState *state)
{
    Rule *rule = state->rules;
    state->rules = NULL;
    while (rule != NULL) {
        Rule *next = rule->next;
        Py_XDECREF(rule->context);
        Py_XDECREF(rule->target);
        PyMem_Free(rule);
        rule = next;
    }
}

static void free_state(void *pointer)
{
    if (pointer != NULL) {
        free_rules(pointer);
        Py_XDECREF(((CodeState *)pointer)->record);
        PyMem_Free(pointer);
    }
}

static CodeState *state_of(PyObject *code, int create)
{
    CodeState *state = NULL;
    if (GET_EXTRA(code, extra_index, (void **)&state) < 0) {
        PyErr_Clear();
        return NULL;
    }
    if (state == NULL && create) {
        state = PyMem_Calloc(1, sizeof(CodeState));
        if (state == NULL || SET_EXTRA(code, extra_index, state) < 0) {
            PyMem_Free(state);
            PyErr_NoMemory();
            return NULL;
        }
    }
    return state;
}

static Rule *find_rule(CodeState *state, PyObject *context)
{
    Rule *rule = state->rules;
    while (rule != NULL && rule->context != context)
        rule = rule->next;
    return rule;
}

static int put_rule(PyObject *code, PyObject *context, PyObject *target)
{
    CodeState *state = state_of(code, 1);
    if (state == NULL)
        return -1;
    Rule *rule = find_rule(state, context);
    if (rule == NULL) {
        rule = PyMem_Calloc(1, sizeof(Rule));
        if (rule == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        rule->context = Py_NewRef(context);
        rule->next = state->rules;
        state->rules = rule;
    }
    PyObject *old = rule->target;
    rule->target = target == Py_None ? NULL : Py_NewRef(target);
    Py_XDECREF(old);
    return 0;
}

/* ---- how deep? --------------------------------------------------------------------------------------------- */

/* With a hook installed, every Python call is a C call, too. CPython 3.12 and 3.13 count those and stop after a fixed
 * number, far below the recursion limit that the user set. We look at the real stack instead, and take our calls out of
 * the count. The frames of a compiled call that the program knows nothing of are taken out of the other one: the entry,
 * and two around a graph break. */
#define C_DEPTH_OF_EVALUATOR 2 /* PY_EVAL_C_STACK_UNITS in ceval.c */
#define OUR_FRAMES (stack_end == NULL ? 0 : 2)
#define DEPTH_FOR_ERRORS 100
#if !EVALUATOR_OWNS_FRAME
static _Thread_local int unused_depth; /* 3.11 counts both in one */
#endif
static _Thread_local char *stack_end = NULL; /* below this there is too little stack left; NULL: not known */

static void find_stack(void)
{
#ifdef __linux__
    pthread_attr_t attributes;
    void *start;
    size_t size;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &start, &size) == 0)
        /* half of a small stack, as threads of servers have; half of less than 256 KiB is too little to compile */
        stack_end = (char *)start + (size / 8 > 262144 ? size / 8 : size >= 262144 && size < 524288 ? size / 2 : 262144);
    pthread_attr_destroy(&attributes);
#endif
}

static PyObject *evaluate_plain(PyThreadState *tstate, struct _PyInterpreterFrame *frame, int throwflag)
{
    if (stack_end == NULL)
        return _PyEval_EvalFrameDefault(tstate, frame, throwflag);
    char here;
    if (&here < stack_end && !throwflag) {
        PyErr_SetString(PyExc_RecursionError, "maximum recursion depth exceeded (of the C stack)");
#if EVALUATOR_OWNS_FRAME
        throwflag = 1; /* unwinds the frame at once */
#else
        return NULL;
#endif
    }
    C_DEPTH_LEFT(tstate) += C_DEPTH_OF_EVALUATOR;
    PyObject *result = _PyEval_EvalFrameDefault(tstate, frame, throwflag);
    C_DEPTH_LEFT(tstate) -= C_DEPTH_OF_EVALUATOR;
    return result;
}

/* ---- evaluating a frame ------------------------------------------------------------------------------------- */

/* A frame was replaced by a call. In 3.11 our caller clears it. Later the evaluator must: entered with an exception
 * pending, it unwinds the frame at once, before the first instruction, and clears it. That exception is dropped again,
 * and if the call failed, its own set: its traceback shall not name the first line of the frame. */
static PyObject *leave_frame(PyThreadState *tstate, struct _PyInterpreterFrame *frame, PyObject *result)
{
#if EVALUATOR_OWNS_FRAME
    PyObject *error = PyErr_GetRaisedException();
    PyErr_SetNone(PyExc_StopIteration);
    PyObject *nothing = evaluate_plain(tstate, frame, 1);
    Py_XDECREF(nothing);
    PyErr_Clear();
    PyErr_SetRaisedException(error);
#endif
    return result;
}

static PyObject *call_target(PyObject *target, PyFunctionObject *function, PyCodeObject *code, PyObject **arguments)
{
    PyObject *small[16];
    PyObject **call = small;
    Py_ssize_t count = code->co_argcount + code->co_kwonlyargcount + ((code->co_flags & CO_VARARGS) != 0) +
                       ((code->co_flags & CO_VARKEYWORDS) != 0);
    if (count + 2 > 16) {
        call = PyMem_Malloc((count + 2) * sizeof(PyObject *));
        if (call == NULL)
            return PyErr_NoMemory();
    }
    call[0] = NULL; /* room that PY_VECTORCALL_ARGUMENTS_OFFSET promises */
    call[1] = (PyObject *)function;
    for (Py_ssize_t i = 0; i < count; i++)
        call[i + 2] = arguments[i];
    Py_INCREF(target); /* the rule may change while it runs */
    PyObject *result = PyObject_Vectorcall(target, call + 1, (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(target);
    if (call != small)
        PyMem_Free(call);
    return result;
}

/* First meeting of a code object in a context. Returns its target (borrowed) or NULL: with an exception, or without
 * one for "as it is". Python runs outside the region, so that the callback is not itself captured. */
static PyObject *ask(PyFunctionObject *function, PyCodeObject *code, PyObject *context)
{
    PyObject *saved = region;
    region = NULL;
    PyObject *answer = PyObject_CallFunctionObjArgs(callback, function, code, context, NULL);
    leave_for(saved);
    if (answer == NULL)
        return NULL;
    CodeState *state = state_of((PyObject *)code, 1);
    if (state == NULL || (answer != Py_False && put_rule((PyObject *)code, context, answer) < 0)) {
        Py_DECREF(answer);
        return NULL;
    }
    if (answer == Py_False)
        state->skip = 1;
    Py_DECREF(answer);
    Rule *rule = find_rule(state, context);
    return rule == NULL ? NULL : rule->target;
}

/* The target of a resume function has raised, or asking for one has: the function itself has not begun. Whoever waits for
 * the exception where it begins is known to Python. Returns NULL with an exception, or what to return instead. */
static PyObject *raised(PyThreadState *tstate, CodeState *state, PyFunctionObject *function, PyCodeObject *code,
                        PyObject **arguments)
{
    if (on_error == NULL || state == NULL || state->record == NULL)
        return NULL;
    PyObject *type, *error, *trace, *given = NULL, *answer = NULL, *saved = region;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    if (PyDict_GetItemString(state->record, "origin") == NULL)
        answer = Py_NewRef(Py_None);
    else if ((given = PyTuple_New(code->co_argcount)) != NULL) {
        for (Py_ssize_t i = 0; i < code->co_argcount; i++)
            PyTuple_SET_ITEM(given, i, Py_NewRef(arguments[i]));
        region = NULL;
        PYTHON_DEPTH_LEFT(tstate) += DEPTH_FOR_ERRORS; /* it may be a RecursionError */
        answer = PyObject_CallFunctionObjArgs(on_error, function, given, error, NULL);
        PYTHON_DEPTH_LEFT(tstate) -= DEPTH_FOR_ERRORS;
        leave_for(saved);
        Py_DECREF(given);
    }
    if (answer == Py_None) {
        Py_CLEAR(answer);
        PyErr_Restore(type, error, trace);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return answer;
}

/* Who calls a function keeps its arguments until it returns, so a piece of a function could not give up memory with
 * `del x`. `run_piece` lends them to the frame instead, which has references of its own once it is there. */
typedef struct {
    PyObject *function, **items; /* NULL: nothing is lent */
    Py_ssize_t count;
} Lent;

static _Thread_local Lent *lent = NULL;

static void take_back(Lent *from)
{
    PyObject **items = from->items;
    from->items = NULL;
    for (Py_ssize_t i = 0; items != NULL && i < from->count; i++)
        Py_DECREF(items[i]);
}

static PyObject *evaluate_frame(PyThreadState *tstate, struct _PyInterpreterFrame *frame, int throwflag)
{
    if (lent != NULL && (PyObject *)FRAME_FUNCTION(frame) == lent->function) {
        Lent *from = lent;
        lent = NULL; /* first: while the frame runs, another greenlet may have the stack on which it lies */
        take_back(from);
    }
    PyObject *context = region;
    if (context == NULL || throwflag || tstate->tracing) /* tracing: this is a debugger's own callback */
        return evaluate_plain(tstate, frame, throwflag);
    PyCodeObject *code = FRAME_CODE(frame);
    CodeState *state = state_of((PyObject *)code, 0);
    if (state != NULL && state->skip)
        return evaluate_plain(tstate, frame, 0);
    int flags = code->co_flags;
    if ((flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) || !(flags & CO_NEWLOCALS))
        return evaluate_plain(tstate, frame, 0);
    PyFunctionObject *function = FRAME_FUNCTION(frame);
    Rule *rule = state == NULL ? NULL : find_rule(state, context);
    PyObject *target;
    if (rule != NULL) {
        target = rule->target;
    } else if (callback == NULL) {
        target = NULL;
    } else {
        target = ask(function, code, context);
        if (target == NULL && PyErr_Occurred())
            return leave_frame(tstate, frame, raised(tstate, state, function, code, frame->localsplus));
    }
    if (target == NULL)
        return evaluate_plain(tstate, frame, 0);
    int ours = OUR_FRAMES;
    PYTHON_DEPTH_LEFT(tstate) += ours;
    PyObject *result = call_target(target, function, code, frame->localsplus);
    PYTHON_DEPTH_LEFT(tstate) -= ours;
    if (result == NULL)
        result = raised(tstate, state_of((PyObject *)code, 0), function, code, frame->localsplus);
    if (result == evaluate || (result == missed && result != NULL)) {
        Py_DECREF(result);
        return evaluate_plain(tstate, frame, 0);
    }
    if (result == evaluate_all) {
        Py_DECREF(result);
        PyObject *saved = region;
        region = NULL;
        result = evaluate_plain(tstate, frame, 0);
        leave_for(saved);
        return result;
    }
    return leave_frame(tstate, frame, result);
}

/* ---- the module --------------------------------------------------------------------------------------------- */

/* run(context, f, *args, **kwargs): call f inside a region; context None = outside of any, e.g. for `disable`. */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "run(context, function, *args, **kwargs)");
        return NULL;
    }
    PyObject *saved = region;
    int enter = args[0] != Py_None;
    if (enter && stack_end == NULL)
        find_stack();
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    if (enter && regions++ == 0)
        _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluate_frame);
    region = enter ? Py_NewRef(args[0]) : NULL;
    PyObject *result = PyObject_Vectorcall(args[1], args + 2, count - 2, names);
    leave_for(saved);
    if (enter && --regions == 0)
        _PyInterpreterState_SetEvalFrameFunc(interpreter, _PyEval_EvalFrameDefault);
    return result;
}

/* run_piece([function, arguments]): function(*arguments), of a list that is emptied before. */
static PyObject *run_piece(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *call = count == 1 ? args[0] : NULL;
    if (call == NULL || !PyList_Check(call) || PyList_GET_SIZE(call) != 2 || !PyTuple_Check(PyList_GET_ITEM(call, 1))) {
        PyErr_SetString(PyExc_TypeError, "run_piece([function, arguments])");
        return NULL;
    }
    PyObject *function = Py_NewRef(PyList_GET_ITEM(call, 0)), *arguments = Py_NewRef(PyList_GET_ITEM(call, 1)), *result = NULL;
    Lent *outer = lent, own = {function, NULL, PyTuple_GET_SIZE(arguments)};
    PyObject **items = PyMem_Malloc((own.count + 1) * sizeof(PyObject *));
    int ready = items != NULL && PyList_SetSlice(call, 0, 2, NULL) == 0;
    for (Py_ssize_t i = 0; ready && i < own.count; i++)
        items[i + 1] = Py_NewRef(PyTuple_GET_ITEM(arguments, i));
    Py_DECREF(arguments);
    if (ready) {
        own.items = items + 1;
        lent = &own;
        result = PyObject_Vectorcall(function, own.items, own.count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        lent = outer;
        take_back(&own);
    } else if (items == NULL) {
        PyErr_NoMemory();
    }
    PyMem_Free(items);
    Py_DECREF(function);
    return result;
}

static PyObject *set_region(PyObject *self, PyObject *context)
{
    PyObject *old = region == NULL ? Py_NewRef(Py_None) : region;
    region = context == Py_None ? NULL : Py_NewRef(context);
    return old;
}

static PyObject *get_region(PyObject *self, PyObject *unused)
{
    return Py_NewRef(region == NULL ? Py_None : region);
}

static PyObject *set_callback(PyObject *self, PyObject *function)
{
    PyObject *old = callback;
    callback = function == Py_None ? NULL : Py_NewRef(function);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *set_missed(PyObject *self, PyObject *object)
{
    PyObject *old = missed;
    missed = Py_NewRef(object);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *set_on_error(PyObject *self, PyObject *function)
{
    PyObject *old = on_error;
    on_error = Py_NewRef(function);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *set_target(PyObject *self, PyObject *args)
{
    PyObject *code, *context, *target;
    if (!PyArg_ParseTuple(args, "O!OO", &PyCode_Type, &code, &context, &target) || put_rule(code, context, target) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *change_code(PyObject *code, int skip)
{
    if (!PyCode_Check(code)) {
        PyErr_SetString(PyExc_TypeError, "expected a code object");
        return NULL;
    }
    CodeState *state = state_of(code, 1);
    if (state == NULL)
        return NULL;
    free_rules(state);
    state->skip = skip;
    Py_RETURN_NONE;
}

static PyObject *skip_code(PyObject *self, PyObject *code) { return change_code(code, 1); }
static PyObject *forget_code(PyObject *self, PyObject *code) { return change_code(code, 0); }

static PyObject *record_of(PyObject *self, PyObject *code)
{
    CodeState *state = NULL;
    if (!PyCode_Check(code))
        PyErr_SetString(PyExc_TypeError, "expected a code object");
    else
        state = state_of(code, 1);
    if (state == NULL)
        return NULL;
    if (state->record == NULL) {
        PyObject *made = PyDict_New(); /* may run a finaliser, which may ask for it, too */
        if (state->record == NULL)
            state->record = made;
        else
            Py_XDECREF(made);
    }
    return Py_XNewRef(state->record);
}

/* frame_of(code, globals): a frame that nobody runs, for a traceback. */
static PyObject *frame_of(PyObject *self, PyObject *args)
{
    PyObject *code, *globals;
    if (!PyArg_ParseTuple(args, "O!O!", &PyCode_Type, &code, &PyDict_Type, &globals))
        return NULL;
    return (PyObject *)PyFrame_New(PyThreadState_Get(), (PyCodeObject *)code, globals, NULL);
}

/* targets_of(code): the targets of a code object in all contexts, a list; None if nothing is known about it. */
static PyObject *targets_of(PyObject *self, PyObject *code)
{
    CodeState *state = PyCode_Check(code) ? state_of(code, 0) : NULL;
    if (state == NULL || (state->rules == NULL && !state->skip))
        Py_RETURN_NONE;
    PyObject *list = PyList_New(0);
    for (Rule *rule = state->rules; list != NULL && rule != NULL; rule = rule->next)
        if (PyList_Append(list, rule->target == NULL ? Py_None : rule->target) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *is_installed(PyObject *self, PyObject *unused)
{
    return PyBool_FromLong(_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == evaluate_frame);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS, "run(context, f, *args, **kwargs)"},
    {"run_piece", (PyCFunction)(void (*)(void))run_piece, METH_FASTCALL, "run_piece([function, arguments]), kept by nobody."},
    {"set_region", set_region, METH_O, "Change this thread's context (None = outside); returns the old one."},
    {"get_region", get_region, METH_NOARGS, "This thread's context, or None."},
    {"set_callback", set_callback, METH_O, "callback(function, code, context) -> target, None or False."},
    {"set_missed", set_missed, METH_O, "A second object that, returned by a target, means EVALUATE."},
    {"set_on_error", set_on_error, METH_O, "on_error(function, arguments, exception) of a piece that has not begun."},
    {"set_target", set_target, METH_VARARGS, "set_target(code, context, target or None)"},
    {"skip_code", skip_code, METH_O, "Evaluate frames of this code as they are, always."},
    {"forget_code", forget_code, METH_O, "Forget all that is known about a code object."},
    {"record_of", record_of, METH_O, "A dict that belongs to this code object and dies with it."},
    {"frame_of", frame_of, METH_VARARGS, "A frame of this code with these globals that nobody runs."},
    {"targets_of", targets_of, METH_O, "Its targets in all contexts, a list; None if nothing is known about the code."},
    {"is_installed", is_installed, METH_NOARGS, "Whether CPython asks us before it runs a frame."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "frame_hook", "PEP 523 frame hook", -1, methods};

PyMODINIT_FUNC PyInit_frame_hook(void)
{
    PyObject *m = PyModule_Create(&module);
    extra_index = NEW_EXTRA_INDEX(free_state);
    evaluate = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    evaluate_all = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (m == NULL || extra_index < 0 || evaluate == NULL || PyModule_AddObjectRef(m, "EVALUATE", evaluate) < 0 ||
        evaluate_all == NULL || PyModule_AddObjectRef(m, "EVALUATE_ALL", evaluate_all) < 0)
        return NULL;
    return m;
}
