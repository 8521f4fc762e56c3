/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions between Python's objects and the core's values, and the exception of a status. */
#include "python/binding.h"

#include <string.h>

PyObject *spar_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyObject *spar_list_add(PyObject *list, PyObject *item)
{
    if (!item || PyList_Append(list, item) < 0)
        Py_CLEAR(list);
    Py_XDECREF(item);
    return list;
}

PyObject *spar_tuple_set(PyObject *tuple, Py_ssize_t i, PyObject *item)
{
    if (!item || PyTuple_SetItem(tuple, i, item) < 0)
        Py_CLEAR(tuple);
    return tuple;
}

PyObject *spar_ints_to_tuple(const int64_t *values, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        tuple = spar_tuple_set(tuple, i, PyLong_FromLongLong(values[i]));
    return tuple;
}

Py_ssize_t spar_sequence_size(PyObject *sequence)
{
    if (PyTuple_Check(sequence))
        return PyTuple_Size(sequence);
    return PyList_Check(sequence) ? PyList_Size(sequence) : -1;
}

PyObject *spar_sequence_item(PyObject *sequence, Py_ssize_t i)
{
    return PyTuple_Check(sequence) ? PyTuple_GetItem(sequence, i) : PyList_GetItem(sequence, i);
}

int spar_read_ints(PyObject *tuple, int64_t *values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (values[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *ranks_to_tuple(const spar_ranks *ranks)
{
    int64_t numbers[sizeof ranks->rank / sizeof *ranks->rank];
    for (int i = 0; i < ranks->count; i++)
        numbers[i] = ranks->rank[i];
    return spar_ints_to_tuple(numbers, ranks->count);
}

const char *spar_exception_name(uint32_t status)
{
    static const char *const names[] = {
        [SPAR_INVALID] = "ValueError",
        [SPAR_NO_MEMORY] = "OutOfMemoryError",
        [SPAR_MISMATCH] = "MismatchError",
        [SPAR_TIMEOUT] = "ExchangeTimeoutError",
        [SPAR_PEER_LOST] = "PeerLostError",
        [SPAR_BROKEN] = "GroupBrokenError",
        [SPAR_INTERRUPTED] = "KeyboardInterrupt",
        [SPAR_TRANSPORT] = "TransportError",
        [SPAR_INTERNAL] = "SparError",
    };
    return status < sizeof names / sizeof *names ? names[status] : NULL;
}

PyObject *spar_raise(spar_status status)
{
    if (status == SPAR_INTERRUPTED && PyErr_Occurred())
        return NULL;
    PyObject *text = spar_text(spar_last_error());
    if (!text)
        return NULL;
    if (status == SPAR_INVALID) {
        PyErr_SetObject(PyExc_ValueError, text);
    } else {
        PyObject *errors = PyImport_ImportModule("spar.errors");
        PyObject *class = errors ? PyObject_GetAttrString(errors, spar_exception_name(status)) : NULL;
        PyObject *error = class ? PyObject_CallFunctionObjArgs(class, text, NULL) : NULL;
        PyObject *ranks = error ? ranks_to_tuple(spar_last_error_ranks()) : NULL;
        if (ranks && PyObject_SetAttrString(error, "ranks", ranks) == 0)
            PyErr_SetObject(class, error);
        Py_XDECREF(ranks);
        Py_XDECREF(error);
        Py_XDECREF(class);
        Py_XDECREF(errors);
    }
    Py_DECREF(text);
    return NULL;
}

PyObject *spar_result(spar_status status)
{
    return status == SPAR_OK ? Py_NewRef(Py_None) : spar_raise(status);
}

PyObject *spar_py_description(const spar_description *description)
{
    const spar_gathered_size *gathered = &description->gathered;
    char text[SPAR_GROUP_TEXT + 1] = "";
    memcpy(text, description->text, SPAR_GROUP_TEXT); /* a call may be writing it */
    return Py_BuildValue("N(LLL)", spar_text(text), (long long)gathered->rest, (long long)gathered->dim,
                         (long long)gathered->size);
}
