/* SPDX-License-Identifier: Apache-2.0 */
/* What a view changes in a call: values in the place of arguments, and what the results are. */
#include "python/view.h"

void spar_py_set_to(PyObject **at, PyObject *made)
{
    PyObject *old = *at;
    *at = made;
    Py_XDECREF(old);
}

/* Sets the item at a place of a tuple, which is owned, or appends it if the tuple is shorter. */
static int set_item(PyObject **tuple, Py_ssize_t place, PyObject *value)
{
    Py_ssize_t count = PyTuple_Size(*tuple);
    place = place < count ? place : count;
    PyObject *made = PyTuple_New(place < count ? count : count + 1);
    for (Py_ssize_t i = 0; made && i < count; i++)
        if (i != place)
            made = spar_tuple_set(made, i, Py_NewRef(PyTuple_GetItem(*tuple, i)));
    if (made)
        made = spar_tuple_set(made, place, Py_NewRef(value));
    if (made)
        spar_py_set_to(tuple, made);
    return made ? 0 : -1;
}

/* The same of a dict, which may be NULL. */
static int set_keyword(PyObject **kwargs, PyObject *name, PyObject *value)
{
    PyObject *made = *kwargs ? PyDict_Copy(*kwargs) : PyDict_New();
    if (!made || PyDict_SetItem(made, name, value) < 0) {
        Py_XDECREF(made);
        return -1;
    }
    spar_py_set_to(kwargs, made);
    return 0;
}

int spar_py_replace(PyObject *pairs, PyObject **args, PyObject **kwargs)
{
    for (Py_ssize_t i = 0, count = PyTuple_Size(pairs); i < count; i++) {
        PyObject *pair = PyTuple_GetItem(pairs, i);
        PyObject *place = PyTuple_GetItem(pair, 0), *value = place ? PyTuple_GetItem(pair, 1) : NULL;
        if (!value)
            return -1;
        Py_ssize_t position = PyLong_Check(place) ? PyLong_AsSsize_t(place) : 0;
        if (position < 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "argument %zd is replaced", position);
            return -1;
        }
        if ((PyLong_Check(place) ? set_item(args, position, value) : set_keyword(kwargs, place, value)) < 0)
            return -1;
    }
    return 0;
}

static int set_shard(const spar_view_uses *uses, PyObject *x, PyObject *shard)
{
    if (!spar_py_is_tensor(uses, x))
        return PyObject_SetAttr(x, uses->shard, shard);
    PyObject *attributes = PyObject_GenericGetDict(x, NULL);
    int failed = attributes ? PyDict_SetItem(attributes, uses->shard, shard) : -1;
    Py_XDECREF(attributes);
    return failed;
}

int spar_py_mark(const spar_view_uses *uses, PyObject *out, PyObject *result)
{
    if (result == Py_None)
        return 0;
    if (!PyList_Check(result))
        return set_shard(uses, out, result);
    Py_ssize_t count = PyList_Size(result);
    if (spar_sequence_size(out) != count) {
        PyErr_Format(PyExc_ValueError, "%zd results, where equal calls had %zd", spar_sequence_size(out),
                     count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (set_shard(uses, spar_sequence_item(out, i), PyList_GetItem(result, i)) < 0)
            return -1;
    return 0;
}
