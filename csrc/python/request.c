/* Reads what Python passes of a call: tensors, as (item size, extents, strides, args), and addresses. */
#include "python/binding.h"

#include <stdio.h>
#include <stdlib.h>

/* Reads the ints of a tuple; -1 and an exception for another value. */
static Py_ssize_t read_ints(PyObject *tuple, int64_t *values, Py_ssize_t room, const char *what)
{
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple", what);
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(tuple);
    if (count > room) {
        PyErr_Format(PyExc_ValueError, "%s has %zd entries; expected at most %zd", what, count, room);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (values[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return count;
}

int spar_read_addresses(PyObject *tuple, void **addresses, int count, const char *what)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of %d addresses", what, count);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        addresses[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
        if (!addresses[i] && PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Reads one tensor: (item size, extents, strides, args); its numbers are stored in `room`. */
static int read_tensor(PyObject *tuple, spar_tensor *tensor, int64_t *room, Py_ssize_t size)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        PyErr_SetString(PyExc_TypeError, "a tensor is (item size, extents, strides, args)");
        return -1;
    }
    tensor->item_size = PyLong_AsLongLong(PyTuple_GetItem(tuple, 0));
    if (tensor->item_size == -1 && PyErr_Occurred())
        return -1;
    Py_ssize_t n = read_ints(PyTuple_GetItem(tuple, 1), room, size, "extents");
    if (n < 0)
        return -1;
    Py_ssize_t strides = read_ints(PyTuple_GetItem(tuple, 2), room + n, size - n, "strides");
    if (strides < 0)
        return -1;
    if (strides != n) {
        PyErr_Format(PyExc_ValueError, "%zd extents and %zd strides", n, strides);
        return -1;
    }
    Py_ssize_t args = read_ints(PyTuple_GetItem(tuple, 3), room + 2 * n, size - 2 * n, "args");
    if (args < 0)
        return -1;
    tensor->ndim = (int)n;
    tensor->extents = room;
    tensor->strides = room + n;
    tensor->nargs = (int)args;
    tensor->args = room + 2 * n;
    return 0;
}

/* Counts the numbers in the tuples of one tensor. */
static Py_ssize_t count_numbers(PyObject *tensor)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 1; PyTuple_Check(tensor) && i < PyTuple_Size(tensor); i++) {
        PyObject *part = PyTuple_GetItem(tensor, i);
        count += PyTuple_Check(part) ? PyTuple_Size(part) : 0;
    }
    return count;
}

int spar_read_request(PyObject *tuple, int world, int rank, int sides, spar_py_request *asked)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1, size = 0, used = 0;
    asked->request = (spar_request){world, rank, sides, (int)count, asked->tensors};
    asked->numbers = asked->few;
    if (count < 0 || count > SPAR_GROUP_TENSORS) {
        PyErr_Format(PyExc_ValueError, "%zd tensors; expected a tuple of at most %d", count,
                     SPAR_GROUP_TENSORS);
        return -1;
    }
    for (Py_ssize_t t = 0; t < count; t++)
        size += count_numbers(PyTuple_GetItem(tuple, t));
    if (size > SPAR_PY_NUMBERS && !(asked->numbers = malloc((size_t)size * sizeof *asked->numbers))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t t = 0; t < count; t++) {
        spar_tensor *tensor = &asked->tensors[t];
        if (read_tensor(PyTuple_GetItem(tuple, t), tensor, asked->numbers + used, size - used) < 0)
            return -1;
        used += 2 * tensor->ndim + tensor->nargs;
    }
    return 0;
}

void spar_free_request(spar_py_request *asked)
{
    if (asked->numbers != asked->few)
        free(asked->numbers);
}

spar_status spar_plan_get_named(const char *op, const spar_request *request, spar_plan **plan)
{
    char text[SPAR_GROUP_TEXT];
    spar_status status = spar_plan_get(request, plan);
    if (status == SPAR_OK)
        return status;
    snprintf(text, sizeof text, "%s", spar_last_error());
    return spar_fail(status, "%s: %s", op, text);
}
