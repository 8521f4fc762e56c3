/* SPDX-License-Identifier: Apache-2.0 */
/* Repeated calls of an operation: finds the exchange of an equal call before, and runs it. */
#include "python/turn.h"

#include <stddef.h>

/* What it uses of torch and of spar's Python code: an array, so that one loop keeps them. */
enum {
    GROUPS,  /* the dict of groups, by the id of their process group */
    RESOLVE, /* resolve(group, name) -> the process group of another kind of argument */
    TENSOR,  /* the types of tensors that no tracer has to see */
    PARAMETER,
    MODES,      /* modes() -> how many modes of torch's dispatcher are active */
    TRANSFORMS, /* transforms() -> whether a transform of functorch is */
    FORWARD_AD, /* a module, whose _current_level is below 0 outside of forward mode */
    RECORDS,    /* records() -> whether autograd records */
    APPLY,      /* apply((exchange, None), *inputs) -> the outputs of `again`, recorded */
    UNLIKE,     /* the exception of `again` */
    ADVISE,     /* advise(error, tensors) */
    USED
};
static PyObject *used[USED];

/* Names of attributes and methods. */
#define NAMES(X)                                                                                             \
    X(_current_level)                                                                                        \
    X(_finish)                                                                                               \
    X(device)                                                                                                \
    X(dtype)                                                                                                 \
    X(group)                                                                                                 \
    X(kind)                                                                                                  \
    X(name)                                                                                                  \
    X(numel)                                                                                                 \
    X(prepared)                                                                                              \
    X(report)                                                                                                \
    X(requires_grad)                                                                                         \
    X(type)                                                                                                  \
    X(unsqueeze)
#define FIELD(text) PyObject *text;
static struct {
    NAMES(FIELD)
} names;

enum { SUM = 2 }; /* a kind of spar/_exchange/exchange.py */

PyDoc_STRVAR(use_repeat_doc,
             "use_repeat(groups, resolve, Tensor, Parameter, modes, transforms, forward_ad, records, apply,\n"
             "           Unlike, advise)\n\n"
             "What `repeat` and `again` use: csrc/python/repeated.c.");

static PyObject *use_repeat(PyObject *Py_UNUSED(module), PyObject *args)
{
#define INTERN(text)                                                                                         \
    if (!names.text && !(names.text = PyUnicode_InternFromString(#text)))                                    \
        return NULL;
    NAMES(INTERN)
    if (PyTuple_Size(args) != USED)
        return PyErr_Format(PyExc_TypeError, "use_repeat takes %d arguments", USED);
    for (int i = 0; i < USED; i++)
        used[i] = PyTuple_GetItem(args, i);
    Py_INCREF(args); /* kept for good: once, by the only module that calls this */
    Py_RETURN_NONE;
}

/* Whether a call without arguments, which may have failed before, returned something true; -1 on failure. */
static int is_true(PyObject *result)
{
    int value = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return value;
}

/* ---- running an exchange again ---- */

/* Whether a tensor has the dtype, and its values in memory; lazy: methods that say if not. -1 on failure. */
static int is_plain(PyObject *x, PyObject *dtype, PyObject *lazy)
{
    PyObject *found = PyObject_GetAttr(x, names.dtype);
    Py_XDECREF(found); /* torch keeps all dtypes */
    if (!found || found != dtype)
        return found ? 0 : -1;
    int is = 0;
    for (Py_ssize_t i = 0; !is && i < PyTuple_Size(lazy); i++)
        is = is_true(PyObject_CallMethodObjArgs(x, PyTuple_GetItem(lazy, i), NULL));
    return is < 0 ? -1 : !is;
}

static int all_are_plain(PyObject *inputs, PyObject *dtype, PyObject *lazy)
{
    int plain = 1;
    for (Py_ssize_t i = 0; plain > 0 && i < spar_sequence_size(inputs); i++) {
        PyObject *x = Py_NewRef(spar_sequence_item(inputs, i)); /* the list may change meanwhile */
        plain = is_plain(x, dtype, lazy);
        Py_DECREF(x);
    }
    return plain;
}

/* The inputs of a sum, whose first dim counts the ranks. */
static PyObject *with_rows(PyObject *inputs)
{
    PyObject *rows = PyList_New(0), *zero = PyLong_FromLong(0);
    for (Py_ssize_t i = 0; rows && zero && i < spar_sequence_size(inputs); i++) {
        PyObject *x = Py_NewRef(spar_sequence_item(inputs, i));
        rows = spar_list_add(rows, PyObject_CallMethodObjArgs(x, names.unsqueeze, zero, NULL));
        Py_DECREF(x);
    }
    Py_XDECREF(zero);
    return rows;
}

/* Runs a prepared exchange: (core, dtype, device, whether the core scales, `ItemType.lazy`). */
static PyObject *run_prepared(PyObject *exchange, PyObject *prepared, PyObject *inputs)
{
    static PyObject *zero;
    PyObject *outputs = NULL, *name = PyObject_GetAttr(exchange, names.name);
    PyObject *group = name ? PyObject_GetAttr(exchange, names.group) : NULL;
    if (group && spar_py_turn_of(group) && (zero || (zero = PyLong_FromLong(0)))) {
        PyObject *const args[SPAR_TURN_ARGUMENTS] = {
            [SPAR_TURN_OP] = name,
            [SPAR_TURN_DEVICE] = PyTuple_GetItem(prepared, 2),
            [SPAR_TURN_CORE] = PyTuple_GetItem(prepared, 0),
            [SPAR_TURN_INPUTS] = inputs,
            [SPAR_TURN_OUTS] = Py_None,
            [SPAR_TURN_FORWARD] = zero,
            [SPAR_TURN_ALIKE] = Py_True,
            [SPAR_TURN_QUEUED] = Py_False,
            [SPAR_TURN_ACTION] = Py_None,
        };
        outputs = spar_py_take_turn(group, args);
    }
    if (outputs && outputs != Py_None && !PyObject_IsTrue(PyTuple_GetItem(prepared, 3))) {
        PyObject *unscaled = outputs;
        outputs = PyObject_CallMethodObjArgs(exchange, names._finish, unscaled, Py_None,
                                             PyTuple_GetItem(prepared, 1), NULL);
        Py_DECREF(unscaled);
    }
    Py_XDECREF(group);
    Py_XDECREF(name);
    return outputs;
}

/* The outputs of an exchange for plain tensors that no tracer must see; None: they do not have the dtype,
 * device and shapes of the newest ones, and nothing was exchanged. */
static PyObject *run_again(PyObject *exchange, PyObject *inputs)
{
    PyObject *prepared = PyObject_GetAttr(exchange, names.prepared);
    if (!prepared || prepared == Py_None)
        return prepared;
    PyObject *outputs = NULL, *kind = PyObject_GetAttr(exchange, names.kind), *rows = NULL;
    /* The core knows DLPack's names of dtypes, which some share, such as int2 and int3. */
    int plain = kind ? all_are_plain(inputs, PyTuple_GetItem(prepared, 1), PyTuple_GetItem(prepared, 4)) : -1;
    if (plain == 0) {
        outputs = Py_NewRef(Py_None);
    } else if (plain > 0 && PyLong_AsLong(kind) == SUM) {
        rows = with_rows(inputs);
        if (rows) {
            outputs = run_prepared(exchange, prepared, rows);
        } else if (PyErr_ExceptionMatches(
                       PyExc_RuntimeError)) { /* a nested tensor, which the checks refuse */
            PyErr_Clear();
            outputs = Py_NewRef(Py_None);
        }
    } else if (plain > 0) {
        outputs = run_prepared(exchange, prepared, inputs);
    }
    Py_XDECREF(rows);
    Py_XDECREF(kind);
    Py_DECREF(prepared);
    return outputs;
}

PyDoc_STRVAR(
    again_doc,
    "again(exchange, inputs) -> the outputs\n\n"
    "Run an Exchange for a tuple or list of plain tensors that no tracer must see. Raises Unlike if\n"
    "they do not have the dtype, device and shapes of the newest ones: nothing was exchanged.");

static PyObject *module_again(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !used[UNLIKE])
        return PyErr_Format(PyExc_TypeError, "again takes 2 arguments, after use_repeat()");
    PyObject *outputs = run_again(args[0], args[1]);
    if (outputs == Py_None) {
        Py_CLEAR(outputs);
        PyErr_SetNone(used[UNLIKE]);
    }
    return outputs;
}

/* ---- finding an exchange ---- */

enum { NAME, INPUT, GROUP, ARGUMENTS, COUNT };

typedef struct {
    PyObject *group;  /* spar's, a turn */
    PyObject *inputs; /* a tuple or list */
    PyObject *key;    /* by which the group has the exchange */
    int one, records;
} repeated;

static void clear(repeated *call)
{
    Py_CLEAR(call->group);
    Py_CLEAR(call->inputs);
    Py_CLEAR(call->key);
}

/* A new reference; NULL without an exception: there is none. */
static PyObject *group_by_id(const PyObject *process_group)
{
    PyObject *id = PyLong_FromVoidPtr((void *)(uintptr_t)process_group);
    PyObject *group = id ? PyDict_GetItemWithError(used[GROUPS], id) : NULL;
    Py_XDECREF(id);
    return Py_XNewRef(group);
}

/* Finds spar's group of a group argument; -1 on failure. */
static int find_group(PyObject *const *args, repeated *call)
{
    PyObject *group = group_by_id(args[GROUP]);
    if (!group && !PyErr_Occurred()) {
        PyObject *found = PyObject_CallFunctionObjArgs(used[RESOLVE], args[GROUP], args[NAME], NULL);
        group = found ? group_by_id(found) : NULL;
        Py_XDECREF(found);
    }
    call->group = group;
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether a mode, a transform or forward mode must see the call; -1 on failure. */
static int is_watched(void)
{
    PyObject *level = PyObject_GetAttr(used[FORWARD_AD], names._current_level);
    int watched = level ? PyLong_AsLong(level) >= 0 : -1;
    Py_XDECREF(level);
    if (watched == 0)
        watched = is_true(PyObject_CallNoArgs(used[MODES]));
    if (watched == 0)
        watched = is_true(PyObject_CallNoArgs(used[TRANSFORMS]));
    return PyErr_Occurred() ? -1 : watched;
}

/* Whether all inputs are plain tensors, and whether one requires a gradient; -1 on failure. */
static int read_inputs(repeated *call)
{
    int requires = 0;
    Py_ssize_t count = spar_sequence_size(call->inputs);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *x = spar_sequence_item(call->inputs, i), *type = (PyObject *)Py_TYPE(x);
        if (type != used[TENSOR] && type != used[PARAMETER])
            return 0;
        if (!requires && (requires = is_true(PyObject_GetAttr(x, names.requires_grad))) < 0)
            return -1;
    }
    call->records = requires ? is_true(PyObject_CallNoArgs(used[RECORDS])) : 0;
    return call->records < 0 ? -1 : count > 0;
}

/* The core compares dtypes, devices and shapes; numel keeps apart those that alternate, as of Q and K. */
static PyObject *make_key(PyObject *const *args, const repeated *call)
{
    PyObject *size = PyObject_CallMethodObjArgs(spar_sequence_item(call->inputs, 0), names.numel, NULL);
    PyObject *key = size ? PyTuple_Pack(5, args[NAME], args[ARGUMENTS], call->records ? Py_True : Py_False,
                                        call->one ? Py_True : Py_False, size)
                         : NULL;
    Py_XDECREF(size);
    return key;
}

/* Fills in the call, with a key if it may be repeated; returns 0, or -1 on failure. */
static int read_call(PyObject *const *args, repeated *call)
{
    call->one = spar_sequence_size(args[INPUT]) < 0;
    call->inputs = call->one ? PyTuple_Pack(1, args[INPUT]) : Py_NewRef(args[INPUT]);
    if (!call->inputs || find_group(args, call) < 0)
        return -1;
    if (!call->group)
        return 0;
    int watched = is_watched();
    if (watched)
        return watched < 0 ? -1 : 0;
    int plain = read_inputs(call);
    if (plain > 0)
        call->key = spar_py_turn_of(call->group) ? make_key(args, call) : NULL;
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- a repeated call ---- */

/* The outputs of a call on autograd's tape. */
static PyObject *run_recorded(PyObject *exchange, PyObject *inputs)
{
    Py_ssize_t count = spar_sequence_size(inputs);
    PyObject *args = PyTuple_New(1 + count);
    args = args ? spar_tuple_set(args, 0, PyTuple_Pack(2, exchange, Py_None)) : NULL;
    for (Py_ssize_t i = 0; args && i < count; i++)
        args = spar_tuple_set(args, 1 + i, Py_XNewRef(spar_sequence_item(inputs, i)));
    PyObject *outputs = args ? PyObject_Call(used[APPLY], args, NULL) : NULL;
    Py_XDECREF(args);
    if (!outputs && PyErr_ExceptionMatches(used[UNLIKE])) {
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    return outputs;
}

/* Reports the exception of a call to the peers; it stays, unless this raises another. */
static void report(PyObject *const *args, const repeated *call, long long before)
{
    PyObject *type, *error, *trace, *done = NULL, *advised = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    PyObject *last = PyLong_FromLongLong(before + 1);
    PyObject *tensors = PyLong_FromSsize_t(call->one ? 0 : spar_sequence_size(call->inputs));
    PyObject *first = PySequence_GetItem(call->inputs, 0);
    PyObject *device = first ? PyObject_GetAttr(first, names.device) : NULL;
    PyObject *kind = device ? PyObject_GetAttr(device, names.type) : NULL;
    if (kind && last && tensors)
        done = PyObject_CallMethodObjArgs(call->group, names.report, args[NAME], kind, error, last, NULL);
    if (done)
        advised = PyObject_CallFunctionObjArgs(used[ADVISE], error, tensors, NULL);
    PyObject *const owned[] = {last, tensors, first, device, kind, done};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        Py_XDECREF(owned[i]);
    if (advised) {
        Py_DECREF(advised);
        PyErr_Restore(type, error, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* What `repeat` returns. Takes over the outputs: a list or tuple, None, or NULL. */
static PyObject *result_of(const repeated *call, PyObject *outputs)
{
    PyObject *output = NULL, *result = NULL;
    if (outputs == Py_None)
        result = PyTuple_Pack(2, Py_None, call->key ? call->key : Py_None);
    else if (outputs && (output = call->one ? PySequence_GetItem(outputs, 0) : PySequence_List(outputs)))
        result = PyTuple_Pack(2, output, Py_None);
    Py_XDECREF(output);
    Py_XDECREF(outputs);
    return result;
}

PyDoc_STRVAR(repeat_doc, "repeat(name, input, group, arguments) -> (output, key)\n\n"
                         "As spar/_exchange/repeated.py has it, outside of torch.compile.");

static PyObject *module_repeat(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    repeated call = {0};
    PyObject *result = NULL;
    if (nargs != COUNT || !used[UNLIKE])
        return PyErr_Format(PyExc_TypeError, "repeat takes %d arguments, after use_repeat()", COUNT);
    if (read_call(args, &call) == 0) {
        PyObject *exchanges = call.key ? ((spar_turn *)call.group)->exchanges : NULL;
        PyObject *exchange = exchanges ? PyDict_GetItemWithError(exchanges, call.key) : NULL;
        PyObject *outputs = exchange || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        Py_XINCREF(exchange); /* another thread may let the group forget it meanwhile */
        long long before = exchange ? spar_py_turn_count(call.group) : -1;
        if (exchange && !PyErr_Occurred()) {
            outputs = call.records ? run_recorded(exchange, call.inputs) : run_again(exchange, call.inputs);
            if (!outputs)
                report(args, &call, before);
        }
        Py_XDECREF(exchange);
        result = result_of(&call, outputs);
    }
    clear(&call);
    return result;
}

PyMethodDef spar_py_repeated_methods[] = {
    {"use_repeat", use_repeat, METH_VARARGS, use_repeat_doc},
    {"repeat", (PyCFunction)(void (*)(void))module_repeat, METH_FASTCALL, repeat_doc},
    {"again", (PyCFunction)(void (*)(void))module_again, METH_FASTCALL, again_doc},
    {NULL, NULL, 0, NULL},
};
