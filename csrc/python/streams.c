/* Calls of a spar._C.Comm that are enqueued in a device's stream; torch allocates what they need. */
#include "python/binding.h"

/* The arguments of enqueue, in their order. */
enum {
    OP,
    ITEM_SIZE,
    INPUTS,
    ARGS,
    SCALE_TYPE,
    DIVIDE,
    FACTOR,
    TEXT,
    FORWARD,
    DEADLINE,
    STREAM,
    NATIVE,
    DTYPE,
    EMPTY,
    OUTS,
    COUNT
};

const char spar_py_enqueue_doc[] = PyDoc_STR(
    "enqueue(op, item size, inputs, args, scale_type, divide, factor, text, forward, deadline, stream,\n"
    "        native, dtype, empty, outs)\n"
    "    -> a list of the outputs\n\n"
    "One exchange of tensors of one dtype, given to the stream: returns before its bytes have moved.\n"
    "native as of comm(), now. empty(shape, strides, dtype) allocates a tensor in the order of the\n"
    "stream: outputs, and memory that is freed on return. outs: contiguous tensors to write to instead,\n"
    "or None. If `begun` is false after a failure, the peers know nothing of the call.");

static int read_int(PyObject *object)
{
    return (int)PyLong_AsLong(object);
}

/* Reads what is neither a tensor nor an address; -1 and an exception on failure. */
static int read_call(PyObject *const *args, spar_call *call, PyObject *comm)
{
    call->op = PyUnicode_AsUTF8AndSize(args[OP], NULL);
    call->text = call->op ? PyUnicode_AsUTF8AndSize(args[TEXT], NULL) : NULL;
    if (!call->text)
        return -1;
    call->forward = PyLong_AsLongLong(args[FORWARD]);
    call->stream = PyLong_AsVoidPtr(args[STREAM]);
    call->native = PyLong_AsVoidPtr(args[NATIVE]);
    call->deadline = spar_py_deadline(comm, PyFloat_AsDouble(args[DEADLINE]));
    int dtype = read_int(args[SCALE_TYPE]), divide = PyObject_IsTrue(args[DIVIDE]);
    double factor = PyFloat_AsDouble(args[FACTOR]);
    return PyErr_Occurred() ? -1 : spar_read_scale(dtype, divide, factor, &call->scale);
}

static void *address_of(PyObject *tensor)
{
    spar_py_tensor read;
    spar_py_read_tensor(tensor, &read);
    spar_py_forget_tensor(&read);
    return read.address;
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
static PyObject *take_outputs(PyObject *const *args, const spar_plan *plan, void **addresses)
{
    int given = args[OUTS] != Py_None;
    if (given && spar_sequence_size(args[OUTS]) != plan->ntensors)
        return PyErr_Format(PyExc_ValueError, "%zd outs; expected a list of %d",
                            spar_sequence_size(args[OUTS]), plan->ntensors);
    PyObject *outputs = PyList_New(plan->ntensors);
    for (int t = 0; outputs && t < plan->ntensors; t++) {
        const spar_plan_tensor *tensor = &plan->tensors[t];
        PyObject *output = given ? Py_NewRef(spar_sequence_item(args[OUTS], t))
                                 : allocate(args[EMPTY], args[DTYPE], tensor->out, tensor->ndim);
        if (output)
            addresses[t] = address_of(output);
        if (!output || PyErr_Occurred() || PyList_SetItem(outputs, t, Py_NewRef(output)) < 0)
            Py_CLEAR(outputs);
        Py_XDECREF(output);
    }
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
    call->staging = bytes && staging ? address_of(staging) : NULL;
    if (staging && PyErr_Occurred())
        Py_CLEAR(staging);
    return staging;
}

static spar_status run(spar_comm *comm, spar_call *call)
{
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_comm_run(comm, call);
    Py_END_ALLOW_THREADS;
    return status;
}

PyObject *spar_py_enqueue(spar_comm *comm, PyObject *self, const char *group, PyObject *const *args,
                          Py_ssize_t nargs, int *begun)
{
    void *inputs[SPAR_GROUP_TENSORS], *outputs[SPAR_GROUP_TENSORS];
    spar_py_request asked;
    spar_plan *plan = NULL;
    PyObject *results = NULL, *staging = NULL;
    spar_call call = {.inputs = (const void *const *)inputs,
                      .outputs = outputs,
                      .device = &spar_device_cuda,
                      .group = group};
    if (nargs != COUNT)
        return PyErr_Format(PyExc_TypeError, "enqueue takes %d arguments, and got %zd", COUNT, nargs);
    long long item_size = PyLong_AsLongLong(args[ITEM_SIZE]);
    if (read_call(args, &call, self) < 0)
        return NULL;
    if (spar_read_inputs(call.op, args[INPUTS], args[ARGS], item_size, comm->world, comm->rank,
                         SPAR_SIDE_PULL, &asked, inputs) < 0)
        goto done;
    spar_status status = spar_plan_get_named(call.op, &asked.request, &plan);
    if (status != SPAR_OK) {
        spar_raise(status);
        goto done;
    }
    call.plan = plan;
    results = take_outputs(args, plan, outputs);
    staging = results ? take_staging(comm, args[EMPTY], &call) : NULL;
    *begun = staging != NULL;
    if (staging && (status = run(comm, &call)) != SPAR_OK)
        spar_raise(status);
    if (PyErr_Occurred())
        Py_CLEAR(results);
    Py_XDECREF(staging);
done:
    if (plan)
        spar_plan_release(plan);
    spar_free_request(&asked);
    return results;
}

PyObject *spar_py_wait(spar_comm *comm, PyObject *self, PyObject *args)
{
    double deadline_s;
    if (!PyArg_ParseTuple(args, "d", &deadline_s))
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
