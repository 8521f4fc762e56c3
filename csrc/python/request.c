/* Reads what Python passes of a call: tensors, or what there is to know of them, args and addresses. */
#include "python/binding.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* Returns the number of ints in a tuple; -1 and an exception for another value. */
static Py_ssize_t count_ints(PyObject *tuple, const char *what)
{
    if (PyTuple_Check(tuple))
        return PyTuple_Size(tuple);
    PyErr_Format(PyExc_TypeError, "%s must be a tuple", what);
    return -1;
}

static int read_ints(PyObject *tuple, int64_t *values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (values[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
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

/* Appends a tensor with room for its numbers, and reads its args: these follow its extents and strides. */
static spar_tensor *add_tensor(spar_py_request *asked, int64_t item_size, Py_ssize_t ndim, PyObject *args)
{
    Py_ssize_t nargs = count_ints(args, "args"), count = 2 * ndim + nargs;
    int t = asked->request.ntensors;
    int64_t *room = asked->few + asked->used;
    if (nargs < 0)
        return NULL;
    if (count <= SPAR_PY_NUMBERS - asked->used) {
        asked->used += count;
    } else if (!(room = asked->own[asked->owned++] = malloc((size_t)count * sizeof *room))) {
        PyErr_NoMemory();
        return NULL;
    }
    asked->request.ntensors++;
    asked->tensors[t] = (spar_tensor){item_size, (int)ndim, room, room + ndim, (int)nargs, room + 2 * ndim};
    if (t > 0 && args == asked->args) /* those of the tensor before, as for Q, K and V of equal shapes */
        memcpy(room + 2 * ndim, asked->tensors[t - 1].args, (size_t)nargs * sizeof *room);
    else if (read_ints(args, room + 2 * ndim, nargs) < 0)
        return NULL;
    asked->args = args;
    return &asked->tensors[t];
}

/* Reads the extents and strides of a tensor from tuples. */
static int add_numbers(spar_py_request *asked, int64_t item_size, PyObject *extents, PyObject *strides,
                       PyObject *args)
{
    Py_ssize_t ndim = count_ints(extents, "extents"), n = count_ints(strides, "strides");
    if (ndim < 0 || n < 0)
        return -1;
    if (n != ndim) {
        PyErr_Format(PyExc_ValueError, "%zd extents and %zd strides", ndim, n);
        return -1;
    }
    spar_tensor *tensor = add_tensor(asked, item_size, ndim, args);
    if (!tensor)
        return -1;
    int64_t *numbers = (int64_t *)tensor->extents;
    return read_ints(extents, numbers, ndim) < 0 ? -1 : read_ints(strides, numbers + ndim, ndim);
}

/* Only a tensor without items may lack memory. */
static int check_memory(const spar_tensor *tensor, const char *op, const spar_request *request)
{
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->extents[i] == 0)
            return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s on rank %d of %d: tensor %d of its inputs has items but no memory, as after a resize of "
                 "its storage to 0; expected one whose memory is allocated",
                 op, request->rank, request->world, request->ntensors - 1);
    return -1;
}

/* Copies the numbers: another thread may change the tensor once the GIL is released. */
static int add_object(spar_py_request *asked, const char *op, int64_t item_size, PyObject *object,
                      PyObject *args, void **address)
{
    spar_py_tensor read;
    int status = spar_py_read_tensor(object, &read);
    if (status == 0 && read.shape) {
        status = add_numbers(asked, item_size, read.shape, read.stride, args);
    } else if (status == 0) {
        spar_tensor *tensor = add_tensor(asked, item_size, read.ndim, args);
        size_t size = (size_t)read.ndim * sizeof *read.extents;
        status = tensor ? 0 : -1;
        if (tensor) {
            memcpy((int64_t *)tensor->extents, read.extents, size);
            memcpy((int64_t *)tensor->strides, read.strides, size);
        }
    }
    *address = read.address;
    spar_py_forget_tensor(&read);
    if (status != 0 || *address)
        return status;
    return check_memory(&asked->tensors[asked->request.ntensors - 1], op, &asked->request);
}

/* Begins a request of the objects in a tuple or list; returns how many there are, or -1 and an exception. */
static Py_ssize_t begin(PyObject *objects, int world, int rank, int sides, spar_py_request *asked)
{
    Py_ssize_t count = spar_sequence_size(objects);
    asked->request = (spar_request){world, rank, sides, 0, asked->tensors};
    asked->used = asked->owned = 0;
    if (count >= 0 && count <= SPAR_GROUP_TENSORS)
        return count;
    PyErr_Format(PyExc_ValueError, "%zd tensors; expected a tuple of at most %d", count, SPAR_GROUP_TENSORS);
    return -1;
}

int spar_read_request(PyObject *tuple, int world, int rank, int sides, spar_py_request *asked)
{
    Py_ssize_t count = begin(tuple, world, rank, sides, asked);
    for (Py_ssize_t t = 0; t < count; t++) {
        PyObject *each = spar_sequence_item(tuple, t);
        if (!PyTuple_Check(each) || PyTuple_Size(each) != 4) {
            PyErr_SetString(PyExc_TypeError, "a tensor is (item size, extents, strides, args)");
            return -1;
        }
        int64_t item_size = PyLong_AsLongLong(PyTuple_GetItem(each, 0));
        if ((item_size == -1 && PyErr_Occurred()) ||
            add_numbers(asked, item_size, PyTuple_GetItem(each, 1), PyTuple_GetItem(each, 2),
                        PyTuple_GetItem(each, 3)) < 0)
            return -1;
    }
    return count < 0 ? -1 : 0;
}

int spar_read_inputs(const char *op, PyObject *inputs, PyObject *args, int64_t item_size, int world, int rank,
                     int sides, spar_py_request *asked, void **addresses)
{
    Py_ssize_t count = begin(inputs, world, rank, sides, asked);
    if (count >= 0 && count_ints(args, "args") != count) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "args of %zd tensors for %zd", PyTuple_Size(args), count);
        return -1;
    }
    for (Py_ssize_t t = 0; t < count; t++)
        if (add_object(asked, op, item_size, spar_sequence_item(inputs, t), PyTuple_GetItem(args, t),
                       &addresses[t]) < 0)
            return -1;
    return count < 0 ? -1 : 0;
}

void spar_free_request(spar_py_request *asked)
{
    for (int i = 0; i < asked->owned; i++)
        free(asked->own[i]);
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
