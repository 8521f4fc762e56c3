/* SPDX-License-Identifier: Apache-2.0 */
/* The key of a call of a torch function: all that a rule of the view may depend on. */
#include "python/view.h"

#include <stddef.h>
#include <string.h>

static spar_view_uses uses_of_view;

const char spar_py_use_view_doc[] =
    PyDoc_STR("use_view(Tensor, Parameter, Size, values, has_part, level, getattr, shard,\n"
              "         has_mode, pop_mode, push_mode, handle)\n\n"
              "What spar._C.Mode uses: csrc/python/view.h.");

PyObject *spar_py_use_view(PyObject *Py_UNUSED(module), PyObject *args)
{
    spar_view_uses uses = {0};
    if (!PyArg_ParseTuple(args, "OOOO!OOOUOOOO", &uses.tensor, &uses.parameter, &uses.size, &PyTuple_Type,
                          &uses.values, &uses.has_part, &uses.level, &uses.getattr, &uses.shard,
                          &uses.has_mode, &uses.pop_mode, &uses.push_mode, &uses.handle))
        return NULL;
    const struct {
        PyObject **at;
        const char *text;
    } texts[] = {
        {&uses.shape, "shape"},       {&uses.start, "start"},    {&uses.stop, "stop"},
        {&uses.step, "step"},         {&uses.call, "_call"},     {&uses.finish, "_finish"},
        {&uses.is_true, "true"},      {&uses.is_false, "false"}, {&uses.is_zero, "0.0"},
        {&uses.place, "_spar_place"}, {&uses.code, "_code_of"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].at = PyUnicode_InternFromString(texts[i].text)))
            return NULL;
    /* Kept for good: once, by the only module that calls this. */
    Py_INCREF(args);
    uses_of_view = uses;
    Py_RETURN_NONE;
}

const spar_view_uses *spar_py_view_uses(void)
{
    if (uses_of_view.tensor)
        return &uses_of_view;
    PyErr_SetString(PyExc_RuntimeError, "use_view was not called");
    return NULL;
}

/* ---- reading arguments ---- */

enum { FEW = 32 };

typedef struct {
    const spar_view_uses *uses;
    int is_known;
    int has_part, has_tensor;
    uint64_t weights;
    Py_ssize_t count, room;
    PyObject **items; /* owned; the few, or more on the heap */
    PyObject *few[FEW];
} reading;

static void clear(reading *into)
{
    for (Py_ssize_t i = 0; i < into->count; i++)
        Py_DECREF(into->items[i]);
    if (into->items != into->few)
        PyMem_Free(into->items);
    into->items = into->few;
    into->count = 0;
}

static int grow(reading *into)
{
    Py_ssize_t room = 2 * into->room;
    PyObject **items = PyMem_Malloc((size_t)room * sizeof *items);
    if (!items) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(items, into->items, (size_t)into->count * sizeof *items);
    if (into->items != into->few)
        PyMem_Free(into->items);
    into->items = items;
    into->room = room;
    return 0;
}

/* Takes over the item, which may be NULL. */
static int add_new(reading *into, PyObject *item)
{
    if (!item || (into->count == into->room && grow(into) < 0)) {
        Py_XDECREF(item);
        return -1;
    }
    into->items[into->count++] = item;
    return 0;
}

static PyObject *as_tuple(const reading *from)
{
    PyObject *tuple = PyTuple_New(from->count);
    for (Py_ssize_t i = 0; tuple && i < from->count; i++)
        tuple = spar_tuple_set(tuple, i, Py_NewRef(from->items[i]));
    return tuple;
}

static int add(reading *into, PyObject *item)
{
    return add_new(into, Py_NewRef(item));
}

static int add_value(reading *into, PyObject *x);

int spar_py_is_tensor(const spar_view_uses *uses, PyObject *x)
{
    PyObject *type = (PyObject *)Py_TYPE(x);
    return type == uses->tensor || type == uses->parameter;
}

/* A new reference: None if x is no part. Notes which parameter of the model it is. */
static PyObject *shard_of(reading *into, PyObject *x)
{
    const spar_view_uses *uses = into->uses;
    if (!spar_py_is_tensor(uses, x))
        return PyObject_CallFunctionObjArgs(uses->getattr, x, uses->shard, Py_None, NULL);
    PyObject *attributes = PyObject_GenericGetDict(x, NULL); /* a fifth of getattr's time */
    PyObject *shard = attributes ? PyDict_GetItemWithError(attributes, uses->shard) : NULL;
    if (!shard && !PyErr_Occurred())
        shard = Py_None;
    if (shard == Py_None && (PyObject *)Py_TYPE(x) == uses->parameter) {
        PyObject *place = PyDict_GetItemWithError(attributes, uses->place);
        into->weights = 31 * into->weights + (place ? PyLong_AsUnsignedLongLongMask(place) : 0);
        if (PyErr_Occurred())
            shard = NULL;
    }
    Py_XINCREF(shard);
    Py_XDECREF(attributes);
    return shard;
}

/* Equal parts have the same shard; of a whole tensor the shape counts. */
static int add_tensor(reading *into, PyObject *x)
{
    PyObject *shard = shard_of(into, x);
    if (!shard)
        return -1;
    into->has_tensor = 1;
    if (shard != Py_None) {
        into->has_part = 1;
        return add_new(into, shard);
    }
    Py_DECREF(shard);
    PyObject *shape = PyObject_GetAttr(x, into->uses->shape);
    if (shape || !PyErr_ExceptionMatches(PyExc_RuntimeError))
        return add_new(into, shape);
    PyErr_Clear(); /* a nested tensor of torch.strided has no shape */
    into->is_known = 0;
    return 0;
}

/* A list's size is read before each item, because reading an item may run code. */
static int add_items(reading *into, PyObject *x)
{
    for (Py_ssize_t i = 0; i < spar_sequence_size(x); i++) {
        PyObject *item = Py_NewRef(spar_sequence_item(x, i));
        int failed = add_value(into, item);
        Py_DECREF(item);
        if (failed)
            return -1;
    }
    return 0;
}

static int add_sequence(reading *into, PyObject *x)
{
    if (add(into, (PyObject *)Py_TYPE(x)) < 0 ||
        add_new(into, PyLong_FromSsize_t(spar_sequence_size(x))) < 0 ||
        Py_EnterRecursiveCall(" in the arguments of a torch function"))
        return -1;
    int failed = add_items(into, x);
    Py_LeaveRecursiveCall();
    return failed;
}

static int add_slice(reading *into, PyObject *x)
{
    PyObject *const names[] = {into->uses->start, into->uses->stop, into->uses->step};
    int failed = add(into, (PyObject *)Py_TYPE(x));
    for (int i = 0; !failed && i < 3; i++) {
        PyObject *bound = PyObject_GetAttr(x, names[i]);
        failed = bound ? add_value(into, bound) : -1;
        Py_XDECREF(bound);
    }
    return failed;
}

/* Asks the view whether an object has a part in it, unless another one has. */
static int find_part(reading *into, PyObject *x)
{
    if (into->has_part)
        return 0;
    PyObject *found = PyObject_CallFunctionObjArgs(into->uses->has_part, x, NULL);
    int has_part = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    into->has_part = has_part > 0;
    return has_part < 0 ? -1 : 0;
}

/* An object that no key can tell from others. */
static int add_unknown(reading *into, PyObject *x)
{
    into->is_known = 0;
    return find_part(into, x);
}

/* A tensor whose class may do with it what others do not. */
static int add_subclass(reading *into, PyObject *x)
{
    if (find_part(into, x) < 0 || add(into, (PyObject *)Py_TYPE(x)) < 0)
        return -1;
    return add_tensor(into, x);
}

static int is_value(const reading *into, PyObject *type)
{
    PyObject *values = into->uses->values;
    for (Py_ssize_t i = 0, count = PyTuple_Size(values); i < count; i++)
        if (PyTuple_GetItem(values, i) == type)
            return 1;
    return 0;
}

static int add_value(reading *into, PyObject *x)
{
    const spar_view_uses *uses = into->uses;
    PyObject *type = (PyObject *)Py_TYPE(x);
    if (spar_py_is_tensor(uses, x))
        return add_tensor(into, x);
    if (x == Py_None || PyLong_CheckExact(x) || is_value(into, type))
        return add(into, x);
    if (PyFloat_CheckExact(x)) /* what runs reads its value from the arguments */
        return add(into, PyFloat_AsDouble(x) != 0 ? type : uses->is_zero);
    if (PyBool_Check(x)) /* True equals 1 */
        return add(into, x == Py_True ? uses->is_true : uses->is_false);
    if (type == (PyObject *)&PySlice_Type)
        return add_slice(into, x);
    if (PyList_CheckExact(x) || PyTuple_CheckExact(x) || type == uses->size)
        return add_sequence(into, x);
    int is_tensor = PyObject_IsInstance(x, uses->tensor);
    if (is_tensor < 0)
        return -1;
    return is_tensor ? add_subclass(into, x) : add_unknown(into, x);
}

/* Names, and then values. */
static int add_keywords(reading *into, PyObject *kwargs)
{
    PyObject *names = PyDict_Keys(kwargs), *values = PyDict_Values(kwargs);
    int failed = names && values ? 0 : -1;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(names); i++)
        failed = add(into, PyList_GetItem(names, i));
    if (!failed)
        failed = add_items(into, values);
    Py_XDECREF(names);
    Py_XDECREF(values);
    return failed;
}

int spar_py_call_key(const spar_view_uses *uses, PyObject *func, PyObject *args, PyObject *kwargs,
                     spar_call_key *result)
{
    reading into = {.uses = uses, .is_known = 1, .room = FEW};
    into.items = into.few;
    *result = (spar_call_key){0};
    int failed = add(&into, func) < 0 || add_items(&into, args) < 0 ||
                 (kwargs && add_keywords(&into, kwargs) < 0) ||
                 (into.is_known && !(result->key = as_tuple(&into)));
    clear(&into);
    result->has_part = into.has_part;
    result->has_tensor = into.has_tensor;
    result->weights = into.weights;
    return failed ? -1 : 0;
}
