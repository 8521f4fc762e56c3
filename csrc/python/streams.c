/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a spar._C.Comm that are enqueued in a device's stream; torch allocates what they need. */
#include "python/comm.h"
#include "devices/cuda/outputs.h"

/* The arguments of enqueue, in their order. */
enum {
    EXCHANGE,
    INPUTS,
    OUTS,
    FORWARD,
    ALIKE,
    NUMBER,
    DEADLINE,
    STREAM,
    NATIVE,
    DTYPE,
    EMPTY,
    POOLED,
    COUNT
};

const char spar_py_enqueue_doc[] = PyDoc_STR(
    "enqueue(Exchange, inputs, outs, forward, alike, number, deadline, stream, native, dtype, empty,\n"
    "        pooled)\n"
    "    -> a list of the outputs; None if `alike`, as of exchange, does not hold\n\n"
    "One exchange of tensors of one dtype, given to the stream: returns before its bytes have moved. outs:\n"
    "contiguous tensors to write to, or None. native as of comm(), now. empty(shape, strides, dtype)\n"
    "allocates a tensor in the order of the stream: outputs, and memory that is freed on return. pooled, or\n"
    "None: the same for outputs that peers may write to, by the functions of outputs.h. Unless\n"
    "`begun` is `number` after a failure, the peers know nothing of the call.");

/* Reads what is neither a tensor nor an address; -1 and an exception on failure. */
static int read_call(PyObject *const *args, spar_call *call, PyObject *comm)
{
    call->forward = PyLong_AsLongLong(args[FORWARD]);
    call->stream = PyLong_AsVoidPtr(args[STREAM]);
    call->native = PyLong_AsVoidPtr(args[NATIVE]);
    call->deadline = spar_py_deadline(comm, PyFloat_AsDouble(args[DEADLINE]));
    return PyErr_Occurred() ? -1 : 0;
}

/* Calls `empty` for a contiguous tensor. */
static PyObject *allocate(PyObject *empty, PyObject *dtype, const int64_t *shape, int ndim)
{
    int64_t strides[SPAR_MAX_DIMS], stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= shape[i];
    }
    PyObject *extents = spar_ints_to_tuple(shape, ndim);
    PyObject *steps = extents ? spar_ints_to_tuple(strides, ndim) : NULL;
    PyObject *tensor = steps ? PyObject_CallFunctionObjArgs(empty, extents, steps, dtype, NULL) : NULL;
    Py_XDECREF(extents);
    Py_XDECREF(steps);
    return tensor;
}

/* A new list of the outputs, `outs` or new ones, whose addresses are stored. */
static PyObject *take_outputs(const spar_comm *comm, PyObject *const *args, const spar_call *call,
                              void **addresses)
{
    const spar_plan *plan = call->plan;
    int given = args[OUTS] != Py_None, pooled = args[POOLED] != Py_None && comm->transport->outputs;
    spar_outputs *memory = given || !pooled ? NULL : comm->transport->outputs(comm, call);
    PyObject *empty = args[memory ? POOLED : EMPTY];
    if (given && spar_sequence_size(args[OUTS]) != plan->ntensors)
        return PyErr_Format(PyExc_ValueError, "%zd outs; expected a list of %d",
                            spar_sequence_size(args[OUTS]), plan->ntensors);
    PyObject *outputs = PyList_New(plan->ntensors);
    spar_outputs_enter(memory);
    for (int t = 0; outputs && t < plan->ntensors; t++) {
        const spar_plan_tensor *tensor = &plan->tensors[t];
        PyObject *output = given ? Py_NewRef(spar_sequence_item(args[OUTS], t))
                                 : allocate(empty, args[DTYPE], tensor->out, tensor->ndim);
        if (!output || spar_py_address(output, &addresses[t]) < 0 ||
            PyList_SetItem(outputs, t, Py_NewRef(output)) < 0)
            Py_CLEAR(outputs);
        Py_XDECREF(output);
    }
    spar_outputs_enter(NULL);
    return outputs;
}

/* Allocates the memory that the call needs beside its tensors: a tensor, or None. */
static PyObject *take_staging(spar_comm *comm, PyObject *empty, spar_call *call)
{
    int64_t bytes = 0;
    spar_status status = comm->transport->prepare ? comm->transport->prepare(comm, call, &bytes) : SPAR_OK;
    if (status != SPAR_OK)
        return spar_raise(status);
    PyObject *staging = bytes ? allocate(empty, spar_py_byte_dtype(), &bytes, 1) : Py_NewRef(Py_None);
    call->staging = NULL;
    if (bytes && staging && spar_py_address(staging, &call->staging) < 0)
        Py_CLEAR(staging);
    return staging;
}

PyObject *spar_comm_py_enqueue(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    comm_object *object = (comm_object *)self;
    spar_comm *comm = spar_py_open_comm(self);
    void *outputs[SPAR_GROUP_TENSORS];
    PyObject *results = NULL, *staging = NULL;
    spar_call call = {.outputs = outputs, .group = object->group};
    spar_py_bound bound;
    if (!comm)
        return NULL;
    if (nargs != COUNT)
        return PyErr_Format(PyExc_TypeError, "enqueue takes %d arguments, and got %zd", COUNT, nargs);
    int64_t number = PyLong_AsLongLong(args[NUMBER]);
    if (read_call(args, &call, self) < 0)
        return NULL;
    int other = spar_py_bind(&call, args[EXCHANGE], args[INPUTS], SPAR_SIDE_PULL,
                             PyObject_IsTrue(args[ALIKE]), &bound);
    if (other > 0)
        results = Py_NewRef(Py_None);
    if (other != 0)
        goto done;
    spar_status status = spar_py_find_plan(&bound);
    if (status != SPAR_OK) {
        spar_raise(status);
        goto done;
    }
    results = take_outputs(comm, args, &call, outputs);
    staging = results ? take_staging(comm, args[EMPTY], &call) : NULL;
    if (staging) {
        object->begun = number;
        Py_BEGIN_ALLOW_THREADS;
        status = spar_comm_run(comm, &call);
        Py_END_ALLOW_THREADS;
        if (status != SPAR_OK)
            spar_raise(status);
    }
    if (PyErr_Occurred())
        Py_CLEAR(results);
    Py_XDECREF(staging);
done:
    spar_py_unbind(&bound);
    return results;
}

PyObject *spar_comm_py_wait(PyObject *self, PyObject *args)
{
    spar_comm *comm = spar_py_open_comm(self);
    double deadline_s;
    if (!comm || !PyArg_ParseTuple(args, "d", &deadline_s))
        return NULL;
    if (!comm->transport->wait)
        Py_RETURN_NONE; /* its calls return once they have ended */
    spar_deadline deadline = spar_py_deadline(self, deadline_s);
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = comm->transport->wait(comm, &deadline);
    Py_END_ALLOW_THREADS;
    return spar_result(status);
}
