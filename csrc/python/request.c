/* SPDX-License-Identifier: Apache-2.0 */
/* Reads what Python passes of a call: tensors, or what there is to know of them, layouts and addresses. */
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

int spar_read_ints(PyObject *tuple, int64_t *values, Py_ssize_t count)
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

/* Appends a tensor with room for its numbers: extents, strides, and `nargs` args that the caller fills in. */
static spar_tensor *add_tensor(spar_py_request *asked, int64_t item_size, Py_ssize_t ndim, Py_ssize_t nargs)
{
    Py_ssize_t count = 2 * ndim + nargs;
    int t = asked->request.ntensors;
    int64_t *room = asked->few + asked->used;
    if (count <= SPAR_PY_NUMBERS - asked->used) {
        asked->used += count;
    } else if (!(room = asked->own[asked->owned++] = malloc((size_t)count * sizeof *room))) {
        PyErr_NoMemory();
        return NULL;
    }
    asked->request.ntensors++;
    asked->tensors[t] = (spar_tensor){item_size, (int)ndim, room, room + ndim, (int)nargs, room + 2 * ndim};
    return &asked->tensors[t];
}

/* Appends a tensor whose extents and strides are tuples. */
static spar_tensor *add_numbers(spar_py_request *asked, int64_t item_size, PyObject *extents,
                                PyObject *strides, Py_ssize_t nargs)
{
    Py_ssize_t ndim = count_ints(extents, "extents"), n = count_ints(strides, "strides");
    if (ndim < 0 || n < 0)
        return NULL;
    if (n != ndim)
        return (void *)PyErr_Format(PyExc_ValueError, "%zd extents and %zd strides", ndim, n);
    spar_tensor *tensor = add_tensor(asked, item_size, ndim, nargs);
    int64_t *numbers = tensor ? (int64_t *)tensor->extents : NULL;
    if (!tensor || spar_read_ints(extents, numbers, ndim) < 0 ||
        spar_read_ints(strides, numbers + ndim, ndim) < 0)
        return NULL;
    return tensor;
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
                      void **address)
{
    spar_py_tensor read;
    spar_tensor *tensor = NULL;
    if (spar_py_read_tensor(object, &read) == 0) {
        if (read.shape)
            tensor = add_numbers(asked, item_size, read.shape, read.stride, 0);
        else if ((tensor = add_tensor(asked, item_size, read.ndim, 0))) {
            size_t size = (size_t)read.ndim * sizeof *read.extents;
            memcpy((int64_t *)tensor->extents, read.extents, size);
            memcpy((int64_t *)tensor->strides, read.strides, size);
        }
    }
    *address = read.address;
    asked->kind = asked->request.ntensors == 1 || asked->kind == read.kind ? read.kind : 0;
    spar_py_forget_tensor(&read);
    if (!tensor || *address)
        return tensor ? 0 : -1;
    return check_memory(tensor, op, &asked->request);
}

static void begin(int world, int rank, int sides, spar_py_request *asked)
{
    asked->request = (spar_request){world, rank, sides, 0, asked->tensors};
    asked->used = asked->owned = 0;
    asked->kind = 0;
}

int spar_read_inputs(const char *op, PyObject *inputs, int count, const int *nargs, const int64_t *args,
                     int64_t item_size, int world, int rank, int sides, spar_py_request *asked,
                     void **addresses)
{
    begin(world, rank, sides, asked);
    if (spar_sequence_size(inputs) != count) {
        PyErr_Format(PyExc_ValueError, "%zd tensors; expected a tuple or list of %d",
                     spar_sequence_size(inputs), count);
        return -1;
    }
    for (int t = 0; t < count; args += nargs[t++]) {
        if (add_object(asked, op, item_size, spar_sequence_item(inputs, t), &addresses[t]) < 0)
            return -1;
        asked->tensors[t].args = args;
        asked->tensors[t].nargs = nargs[t];
    }
    return 0;
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
