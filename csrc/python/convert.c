/* Python's objects of the core's values, and the exception of a status. */
#include "python/binding.h"

#include <string.h>

PyObject *spar_ints_to_tuple(const int64_t *values, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, i, value) < 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

static PyObject *ranks_to_tuple(const spar_ranks *ranks)
{
    int64_t numbers[sizeof ranks->rank / sizeof *ranks->rank];
    for (int i = 0; i < ranks->count; i++)
        numbers[i] = ranks->rank[i];
    return spar_ints_to_tuple(numbers, ranks->count);
}

PyObject *spar_raise(spar_status status)
{
    static const char *const classes[] = {
        [SPAR_NO_MEMORY] = "OutOfMemoryError",   [SPAR_MISMATCH] = "MismatchError",
        [SPAR_TIMEOUT] = "ExchangeTimeoutError", [SPAR_PEER_LOST] = "PeerLostError",
        [SPAR_BROKEN] = "GroupBrokenError",      [SPAR_TRANSPORT] = "TransportError",
        [SPAR_INTERNAL] = "SparError",
    };
    /* it may hold other processes' texts, truncated within a character */
    PyObject *text =
        PyUnicode_DecodeUTF8(spar_last_error(), (Py_ssize_t)strlen(spar_last_error()), "replace");
    if (!text)
        return NULL;
    if (status == SPAR_INVALID || status == SPAR_TYPE) {
        PyErr_SetObject(status == SPAR_TYPE ? PyExc_TypeError : PyExc_ValueError, text);
    } else {
        PyObject *errors = PyImport_ImportModule("spar.errors");
        PyObject *class = errors ? PyObject_GetAttrString(errors, classes[status]) : NULL;
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

PyObject *spar_py_raise_after_wait(spar_status status)
{
    return status == SPAR_INTERRUPTED && PyErr_Occurred() ? NULL : spar_raise(status);
}

PyObject *spar_py_description(const spar_description *description)
{
    const spar_gathered *gathered = &description->gathered;
    const char *text = description->text; /* another process may have written it: any bytes */
    PyObject *decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    return decoded ? Py_BuildValue("N(LLL)", decoded, (long long)gathered->rest, (long long)gathered->dim,
                                   (long long)gathered->size)
                   : NULL;
}
