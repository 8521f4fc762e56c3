/* SPDX-License-Identifier: Apache-2.0 */
/* spar._C.Mode, of which a view is a subclass: it runs the calls of torch functions that are known, and gives
 * the others to the view's method `_call`. */
#include "python/view.h"

#include "plan/place.h"

#include <stddef.h>

#include <string.h>
#include <structmember.h>

static PyObject *mode_type; /* made once */

typedef struct {
    PyObject_HEAD
    PyObject *known; /* a dict: by the key of a call that has parts, a tuple of what it does */
    PyObject *plain; /* a set: functions that run as they are if no argument is a part */
    PyObject *codes; /* a dict: by a function, what a call of it adds to the hash of the code; 0: nothing */
    char watching;   /* whether `_call` has to look at each call */
    unsigned long long place[SPAR_PLACE_FIELDS]; /* hashes of what this forward did: plan/place.h */
} mode_object;

/* What a known call does: run a function; with values in the place of some arguments; say what the results
 * are; and more, which the view's method `_finish` does, or None. */
enum { RUN, REPLACED, RESULT, REST };

/* ---- a known call ---- */

/* args and kwargs are owned. */
static PyObject *run_known(PyObject *self, const spar_view_uses *uses, PyObject *known, PyObject **args,
                           PyObject **kwargs)
{
    PyObject *rest = PyTuple_GetItem(known, REST), *out = NULL;
    PyObject *base = Py_NewRef(PyTuple_Size(*args) ? PyTuple_GetItem(*args, 0) : Py_None);
    if (spar_py_replace(PyTuple_GetItem(known, REPLACED), args, kwargs) == 0)
        out = PyObject_Call(PyTuple_GetItem(known, RUN), *args, *kwargs);
    if (out && spar_py_mark(uses, out, PyTuple_GetItem(known, RESULT)) < 0)
        spar_py_set_to(&out, NULL);
    if (out && rest != Py_None)
        spar_py_set_to(&out, PyObject_CallMethodObjArgs(self, uses->finish, rest, base, out, NULL));
    Py_DECREF(base);
    return out;
}

/* ---- a call ---- */

/* Whether a transform of torch.func is active, in which parts are not known as such; -1 and an exception. */
static int is_transformed(const spar_view_uses *uses)
{
    PyObject *level = PyObject_CallNoArgs(uses->level);
    int found = level ? level != Py_None : -1;
    Py_XDECREF(level);
    return found;
}

/* What a call does, a new reference: an entry of `known`, or None if the function runs as it is; NULL without
 * an exception if that is for `_call` to find. */
static PyObject *find(mode_object *self, const spar_view_uses *uses, PyObject *func, const spar_call_key *key)
{
    PyObject *found = NULL;
    if (self->watching)
        return NULL;
    if (!key->has_part)
        found = key->key && PySet_Contains(self->plain, func) > 0 ? Py_None : NULL;
    else if (key->key)
        found = PyDict_GetItemWithError(self->known, key->key);
    if (!found)
        return NULL;
    Py_INCREF(found);
    if (is_transformed(uses) == 0)
        return found;
    Py_DECREF(found);
    return NULL;
}

/* Adds a value to a hash, in which the order counts. */
static void fold(unsigned long long *hash, unsigned long long value)
{
    *hash = (*hash ^ value) * 0x9E3779B97F4A7C15u;
    *hash ^= *hash >> 29;
}

/* Adds a call to the hash of the code that ran: ranks compare it in each exchange. */
static int note_call(mode_object *self, const spar_view_uses *uses, PyObject *func, const spar_call_key *key)
{
    if (!key->has_tensor)
        return 0;
    PyObject *code = PyDict_GetItemWithError(self->codes, func);
    if (!code) {
        PyObject *made =
            PyErr_Occurred() ? NULL : PyObject_CallMethodObjArgs((PyObject *)self, uses->code, func, NULL);
        int failed = made ? PyDict_SetItem(self->codes, func, made) : -1;
        Py_XDECREF(made); /* the dict has it */
        if (failed)
            return -1;
        code = made;
    }
    unsigned long long value = PyLong_AsUnsignedLongLongMask(code);
    if (value)
        fold(&self->place[SPAR_PLACE_CODE], value + key->weights);
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(call_doc, "__torch_function__(func, types, args=(), kwargs=None)\n\n"
                       "Runs a torch function: the method of TorchFunctionMode.");

static PyObject *mode_torch_function(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    enum { FUNC, TYPES, ARGS, KWARGS, MOST };
    const spar_view_uses *uses = spar_py_view_uses();
    if (!uses)
        return NULL;
    if (count < ARGS || count > MOST)
        return PyErr_Format(PyExc_TypeError, "__torch_function__ takes 2 to 4 arguments, not %zd", count);
    if (count > ARGS && !PyTuple_Check(given[ARGS]))
        return PyErr_Format(PyExc_TypeError, "args: %R, not a tuple", given[ARGS]);
    if (count > KWARGS && given[KWARGS] != Py_None && !PyDict_Check(given[KWARGS]))
        return PyErr_Format(PyExc_TypeError, "kwargs: %R, not a dict", given[KWARGS]);
    int has_kwargs = count > KWARGS && given[KWARGS] != Py_None && PyDict_Size(given[KWARGS]);
    int has_out = has_kwargs && PyDict_GetItemString(given[KWARGS], "out"); /* a tensor that it writes */
    PyObject *func = given[FUNC], *out = NULL;
    PyObject *args = count > ARGS ? Py_NewRef(given[ARGS]) : PyTuple_New(0);
    PyObject *kwargs = has_kwargs ? Py_NewRef(given[KWARGS]) : NULL;
    spar_call_key key = {0};
    if (args && spar_py_call_key(uses, func, args, kwargs, &key) == 0 &&
        note_call((mode_object *)self, uses, func, &key) == 0) {
        PyObject *known = has_out ? NULL : find((mode_object *)self, uses, func, &key);
        if (known && known != Py_None)
            out = run_known(self, uses, known, &args, &kwargs);
        else if (known)
            out = PyObject_Call(func, args, kwargs);
        else if (!PyErr_Occurred() && (kwargs || (kwargs = PyDict_New())))
            out = PyObject_CallMethodObjArgs(self, uses->call, key.key ? key.key : Py_None,
                                             key.has_part ? Py_True : Py_False, func, args, kwargs, NULL);
        Py_XDECREF(known);
    }
    Py_XDECREF(key.key);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return out;
}

/* ---- what is known ---- */

PyDoc_STRVAR(remember_doc, "_remember(key, run, replaced, result, rest)\n\n"
                           "What calls of this key do from now on, while nothing is watched: run the\n"
                           "function with `replaced` arguments, say by `result` what the results are, and\n"
                           "return `self._finish(rest, first argument, results)` unless rest is None.");

static PyObject *mode_remember(PyObject *self, PyObject *args)
{
    PyObject *key, *run, *replaced, *result, *rest;
    if (!PyArg_ParseTuple(args, "O!OO!OO", &PyTuple_Type, &key, &run, &PyTuple_Type, &replaced, &result,
                          &rest))
        return NULL;
    PyObject *known = PyTuple_Pack(4, run, replaced, result, rest);
    int failed = known ? PyDict_SetItem(((mode_object *)self)->known, key, known) : -1;
    Py_XDECREF(known);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *mode_remember_plain(PyObject *self, PyObject *func)
{
    return PySet_Add(((mode_object *)self)->plain, func) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *mode_fold(PyObject *self, PyObject *args)
{
    int field;
    unsigned long long value;
    if (!PyArg_ParseTuple(args, "iK", &field, &value))
        return NULL;
    if (field < 0 || field >= SPAR_PLACE_FIELDS)
        return PyErr_Format(PyExc_IndexError, "field %d of a place", field);
    fold(&((mode_object *)self)->place[field], value);
    Py_RETURN_NONE;
}

static PyObject *mode_begin(PyObject *self, PyObject *Py_UNUSED(unused))
{
    mode_object *mode = (mode_object *)self;
    memset(mode->place, 0, sizeof mode->place);
    mode->place[SPAR_PLACE_CODE] = 1; /* not 0, which equals any: a rank that ran nothing is compared */
    Py_RETURN_NONE;
}

static PyObject *mode_word(PyObject *self, void *Py_UNUSED(closure))
{
    const unsigned long long *place = ((mode_object *)self)->place;
    uint64_t hashes[SPAR_PLACE_FIELDS];
    for (int i = 0; i < SPAR_PLACE_FIELDS; i++)
        hashes[i] = place[i];
    return PyLong_FromLongLong(spar_place(hashes));
}

static PyObject *mode_place(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize((const char *)((mode_object *)self)->place,
                                     sizeof((mode_object *)self)->place);
}

static int mode_set_place(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    char *bytes = NULL;
    Py_ssize_t size = 0;
    mode_object *mode = (mode_object *)self;
    if (!value || PyBytes_AsStringAndSize(value, &bytes, &size) < 0 || size != sizeof mode->place) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "_place: expected what it was before");
        return -1;
    }
    memcpy(mode->place, bytes, sizeof mode->place);
    return 0;
}

static PyObject *mode_code_of(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(func))
{
    return PyLong_FromLong(0);
}

static PyObject *mode_forget(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PyDict_Clear(((mode_object *)self)->known);
    Py_RETURN_NONE;
}

/* ---- the object ---- */

/* No tp_clear: the dict and the set break cycles. */
static int mode_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((mode_object *)self)->known);
    Py_VISIT(((mode_object *)self)->plain);
    Py_VISIT(((mode_object *)self)->codes);
    return 0;
}

static PyObject *mode_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    mode_object *self = (mode_object *)PyType_GenericAlloc(type, 0);
    if (self && (!(self->known = PyDict_New()) || !(self->plain = PySet_New(NULL)) ||
                 !(self->codes = PyDict_New()))) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void mode_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((mode_object *)self)->known);
    Py_XDECREF(((mode_object *)self)->plain);
    Py_XDECREF(((mode_object *)self)->codes);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMethodDef mode_methods[] = {
    {"__torch_function__", (PyCFunction)(void (*)(void))mode_torch_function, METH_FASTCALL, call_doc},
    {"_remember", mode_remember, METH_VARARGS, remember_doc},
    {"_remember_plain", mode_remember_plain, METH_O,
     "_remember_plain(func): it runs as it is from now on, if no argument is a part."},
    {"_fold", mode_fold, METH_VARARGS, "_fold(field, value): adds a value to a hash of the place."},
    {"_code_of", mode_code_of, METH_O,
     "_code_of(func): what a call of it adds to the hash of the code; to override."},
    {"_begin", mode_begin, METH_NOARGS, "Begins the place of a forward."},
    {"_forget", mode_forget, METH_NOARGS, "Forgets what calls of parts do."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef mode_members[] = {
    {"_is_watching", T_BOOL, offsetof(mode_object, watching), 0, "whether `_call` has to look at each call"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef mode_getset[] = {
    {"word", mode_word, NULL, "what the code has run, as an exchange's word: csrc/plan/place.h", NULL},
    {"_place", mode_place, mode_set_place, "the hashes of what the code has run, to set them back", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mode_slots[] = {
    {Py_tp_doc, "Runs the calls of torch functions that are known, and gives others to `_call`."},
    {Py_tp_new, mode_new},
    {Py_tp_dealloc, mode_dealloc},
    {Py_tp_traverse, mode_traverse},
    {Py_tp_methods, mode_methods},
    {Py_tp_members, mode_members},
    {Py_tp_getset, mode_getset},
    {0, NULL},
};

static PyType_Spec mode_spec = {
    .name = "spar._C.Mode",
    .basicsize = sizeof(mode_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mode_slots,
};

PyObject *spar_mode_type(void)
{
    if (!mode_type)
        mode_type = PyType_FromSpec(&mode_spec);
    return Py_XNewRef(mode_type);
}

/* ---- functions of torch that are written in Python ---- */

static PyObject *keywords(PyObject *const *values, PyObject *names)
{
    PyObject *kwargs = PyDict_New();
    for (Py_ssize_t i = 0, count = names ? PyTuple_Size(names) : 0; kwargs && i < count; i++)
        if (PyDict_SetItem(kwargs, PyTuple_GetItem(names, i), values[i]) < 0)
            spar_py_set_to(&kwargs, NULL);
    return kwargs;
}

static PyObject *arguments(PyObject *const *given, Py_ssize_t count)
{
    PyObject *args = PyTuple_New(count);
    for (Py_ssize_t i = 0; args && i < count; i++)
        args = spar_tuple_set(args, i, Py_NewRef(given[i]));
    return args;
}

/* Takes the innermost mode off torch's stack and runs it, if it is a Mode; else the result is NULL without an
 * exception. */
static PyObject *run_mode(const spar_view_uses *uses, PyObject *const *call, Py_ssize_t count)
{
    PyObject *enabled = PyObject_CallNoArgs(uses->has_mode);
    int is_enabled = enabled ? PyObject_IsTrue(enabled) : -1;
    Py_XDECREF(enabled);
    PyObject *mode = is_enabled > 0 ? PyObject_CallNoArgs(uses->pop_mode) : NULL, *out = NULL;
    if (!mode)
        return NULL;
    if (PyObject_TypeCheck(mode, (PyTypeObject *)mode_type))
        out = mode_torch_function(mode, call, count);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *pushed = PyObject_CallFunctionObjArgs(uses->push_mode, mode, NULL);
    Py_DECREF(mode);
    if (!pushed)
        spar_py_set_to(&out, NULL);
    if (pushed || type)
        PyErr_Restore(type, value, trace);
    Py_XDECREF(pushed);
    return out;
}

PyDoc_STRVAR(
    handle_doc,
    "handle_torch_function(public_api, relevant_args, *args, **kwargs)\n\n"
    "torch.overrides.handle_torch_function in a third of its time where the innermost mode is a Mode.");

static PyObject *module_handle(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count,
                               PyObject *names)
{
    enum { FUNC, RELEVANT, FIRST };
    const spar_view_uses *uses = spar_py_view_uses();
    if (!uses)
        return NULL;
    if (count < FIRST)
        return PyErr_Format(PyExc_TypeError, "handle_torch_function takes at least 2 arguments, not %zd",
                            count);
    PyObject *kwargs = keywords(given + count, names), *out = NULL;
    PyObject *args = kwargs ? arguments(given + FIRST, count - FIRST) : NULL;
    if (args) {
        PyObject *const call[] = {given[FUNC], given[RELEVANT], args, kwargs};
        out = run_mode(uses, call, sizeof call / sizeof *call);
    }
    if (args && !out && !PyErr_Occurred()) {
        PyObject *all = arguments(given, count);
        out = all ? PyObject_Call(uses->handle, all, kwargs) : NULL;
        Py_XDECREF(all);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return out;
}

/* ---- functions that the view's own code shares ---- */

static PyObject *module_words_differ(PyObject *Py_UNUSED(module), PyObject *words)
{
    int64_t known = 0;
    int differ = 0;
    for (Py_ssize_t i = 0; i < spar_sequence_size(words); i++) {
        int64_t word = PyLong_AsLongLong(spar_sequence_item(words, i));
        if (PyErr_Occurred())
            return NULL;
        differ |= spar_forward_differs(known, word);
        known = spar_forward_merged(known, word);
    }
    return PyBool_FromLong(differ);
}

static PyObject *module_replaced(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *args, *kwargs, *pairs, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs, &PyTuple_Type,
                          &pairs))
        return NULL;
    Py_INCREF(args);
    Py_INCREF(kwargs);
    if (spar_py_replace(pairs, &args, &kwargs) == 0)
        result = PyTuple_Pack(2, args, kwargs);
    Py_DECREF(args);
    Py_DECREF(kwargs);
    return result;
}

static PyObject *module_mark_results(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *out, *result;
    const spar_view_uses *uses = spar_py_view_uses();
    if (!uses || !PyArg_ParseTuple(args, "OO", &out, &result) || spar_py_mark(uses, out, result) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *module_call_key(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *func, *args, *kwargs;
    const spar_view_uses *uses = spar_py_view_uses();
    spar_call_key key = {0};
    if (!uses || !PyArg_ParseTuple(arguments, "OO!O!", &func, &PyTuple_Type, &args, &PyDict_Type, &kwargs) ||
        spar_py_call_key(uses, func, args, kwargs, &key) < 0)
        return NULL;
    return key.key ? key.key : Py_NewRef(Py_None);
}

PyMethodDef spar_py_view_methods[] = {
    {"call_key", module_call_key, METH_VARARGS,
     "call_key(func, args, kwargs) -> all of a call that a rule may depend on; None where no key tells it"},
    {"use_view", spar_py_use_view, METH_VARARGS, spar_py_use_view_doc},
    {"replaced", module_replaced, METH_VARARGS,
     "replaced(args, kwargs, pairs) -> (args, kwargs), with other values at positions or names"},
    {"mark_results", module_mark_results, METH_VARARGS,
     "mark_results(out, result): says that a result is this shard, or several those of a list."},
    {"words_differ", module_words_differ, METH_O,
     "words_differ(words): whether ranks' words cannot be of one call; 0 equals any."},
    {"handle_torch_function", (PyCFunction)(void (*)(void))module_handle, METH_FASTCALL | METH_KEYWORDS,
     handle_doc},
    {NULL, NULL, 0, NULL},
};
