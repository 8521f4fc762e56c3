/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a spar._C.Comm that are enqueued in a device's stream; torch allocates what they need. */
#include "python/comm.h"
#include "devices/cuda/outputs.h"

/* ---- what calls use of torch ---- */

const char spar_py_bind_torch_doc[] = PyDoc_STR(
    "bind_torch(index, enter, leave, stream, empty, sums, refuse, native)\n\n"
    "What enqueue uses of torch; once, before the first call. index: the device's. enter(index): make it\n"
    "the thread's current device, and return the one before, which leave(before) restores. stream(index):\n"
    "the handle of its current stream. empty(shape, strides, dtype): allocate a tensor in the order of the\n"
    "stream: outputs, and memory that is freed on return. sums(rows, outs): the sums of each tensor's rows.\n"
    "refuse(op, index): raise that the tensors are on another device. native(op): torch's ncclComm_t, now;\n"
    "None: the transport uses none.");

PyObject *spar_comm_py_bind_torch(PyObject *self, PyObject *args)
{
    spar_py_torch *torch = &((comm_object *)self)->torch, found = {0};
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &found.index, &found.enter, &found.leave, &found.stream,
                          &found.empty, &found.sums, &found.refuse, &found.native))
        return NULL;
    found.ordinal = PyLong_AsLong(found.index);
    if (PyErr_Occurred())
        return NULL;
    found.bound = Py_NewRef(args); /* owns the others */
    PyObject *before = torch->bound;
    *torch = found;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* The functions of a pool, in their order. */
enum { POOL_BEGIN, POOL_END, POOL_RELEASE, POOL_FUNCTIONS };

PyObject *spar_comm_py_pool(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *pool = ((comm_object *)self)->pool;
    return Py_NewRef(pool ? pool : Py_None);
}

int spar_comm_py_set_pool(PyObject *self, PyObject *pool, void *Py_UNUSED(closure))
{
    comm_object *object = (comm_object *)self;
    PyObject *before = object->pool;
    if (!pool || (pool != Py_None && spar_sequence_size(pool) < POOL_FUNCTIONS)) {
        PyErr_Format(PyExc_TypeError, "a pool is None, or a tuple that begins with %d functions",
                     POOL_FUNCTIONS);
        return -1;
    }
    object->pool = pool != Py_None ? Py_NewRef(pool) : NULL;
    Py_XDECREF(before);
    return 0;
}

static int call_pool(PyObject *pool, int function)
{
    PyObject *result = PyObject_CallNoArgs(spar_sequence_item(pool, function));
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Balances POOL_BEGIN: torch counts the users of a pool. The first exception stays set. */
static void leave_pool(PyObject *pool)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (int function = POOL_END; function <= POOL_RELEASE; function++) {
        if (call_pool(pool, function) == 0)
            continue;
        if (type)
            PyErr_Clear();
        else
            PyErr_Fetch(&type, &value, &trace);
    }
    PyErr_Restore(type, value, trace);
}

/* ---- memory ---- */

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

/* A new list of new outputs, whose addresses are stored. */
static PyObject *new_outputs(PyObject *empty, PyObject *dtype, const spar_plan *plan, void **addresses)
{
    PyObject *outputs = PyList_New(plan->ntensors);
    for (int t = 0; outputs && t < plan->ntensors; t++) {
        const spar_plan_tensor *tensor = &plan->tensors[t];
        PyObject *output = allocate(empty, dtype, tensor->out, tensor->ndim);
        if (!output || spar_py_address(output, &addresses[t]) < 0 ||
            PyList_SetItem(outputs, t, Py_NewRef(output)) < 0)
            Py_CLEAR(outputs);
        Py_XDECREF(output);
    }
    return outputs;
}

/* The same, where peers can write to them if the transport has such memory for this call. */
static PyObject *take_outputs(comm_object *object, PyObject *dtype, const spar_call *call, void **addresses)
{
    const spar_comm *comm = object->comm;
    PyObject *pool = comm->transport->outputs ? object->pool : NULL;
    spar_outputs *memory = pool ? comm->transport->outputs(comm, call) : NULL;
    if (!memory)
        return new_outputs(object->torch.empty, dtype, call->plan, addresses);
    PyObject *outputs = NULL;
    Py_INCREF(pool);
    if (call_pool(pool, POOL_BEGIN) == 0) {
        spar_outputs_enter(memory);
        outputs = new_outputs(object->torch.empty, dtype, call->plan, addresses);
        spar_outputs_enter(NULL);
        leave_pool(pool);
        if (outputs && PyErr_Occurred())
            Py_CLEAR(outputs);
    }
    Py_DECREF(pool);
    return outputs;
}

/* Stores the addresses of a call's outs; a list of None for each of them, or NULL and an exception. */
static PyObject *read_outs(PyObject *outs, const spar_plan *plan, void **addresses)
{
    if (spar_sequence_size(outs) != plan->ntensors)
        return PyErr_Format(PyExc_ValueError, "%zd outs; expected a list of %d", spar_sequence_size(outs),
                            plan->ntensors);
    PyObject *results = PyList_New(plan->ntensors);
    for (int t = 0; results && t < plan->ntensors; t++)
        if (spar_py_address(spar_sequence_item(outs, t), &addresses[t]) < 0 ||
            PyList_SetItem(results, t, Py_NewRef(Py_None)) < 0)
            Py_CLEAR(results);
    return results;
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

/* ---- a call ---- */

/* The arguments of enqueue, in their order: those of exchange. */
enum { EXCHANGE, INPUTS, OUTS, FORWARD, ALIKE, NUMBER, DEADLINE, COUNT };

const char spar_py_enqueue_doc[] = PyDoc_STR(
    "enqueue(Exchange, inputs, outs, forward, alike, number, deadline) -> a list of the outputs\n\n"
    "As exchange, but given to the device's current stream: it returns before the bytes have moved. outs: a\n"
    "list of contiguous tensors to write to, and None is returned for each; or None. Unless `begun` is\n"
    "`number` after a failure, the peers know nothing of the call.");

/* Asks torch for its current communicator and stream. */
static int read_stream(const spar_py_torch *torch, spar_call *call)
{
    if (torch->native != Py_None) {
        PyObject *op = PyUnicode_FromString(call->op);
        PyObject *native = op ? PyObject_CallFunctionObjArgs(torch->native, op, NULL) : NULL;
        call->native = native ? PyLong_AsVoidPtr(native) : NULL;
        Py_XDECREF(native);
        Py_XDECREF(op);
    }
    PyObject *stream =
        PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(torch->stream, torch->index, NULL);
    call->stream = stream ? PyLong_AsVoidPtr(stream) : NULL;
    Py_XDECREF(stream);
    return PyErr_Occurred() ? -1 : 0;
}

/* Takes the memory of a call, and gives it to the stream. Returns what `enqueue` does, but rows of a sum. */
static PyObject *run_call(comm_object *object, PyObject *const *args, int64_t number, spar_call *call)
{
    static PyObject *dtype_name;
    spar_comm *comm = object->comm;
    const spar_py_torch *torch = &object->torch;
    void *outputs[SPAR_GROUP_TENSORS];
    PyObject *results = NULL, *staging = NULL;
    call->outputs = outputs;
    if (args[OUTS] != Py_None && call->sum == SPAR_NO_SUM) {
        results = read_outs(args[OUTS], call->plan, outputs);
    } else if (dtype_name || (dtype_name = PyUnicode_InternFromString("dtype"))) {
        PyObject *dtype = PyObject_GetAttr(spar_sequence_item(args[INPUTS], 0), dtype_name);
        results = dtype ? take_outputs(object, dtype, call, outputs) : NULL;
        Py_XDECREF(dtype);
    }
    staging = results ? take_staging(comm, torch->empty, call) : NULL;
    if (staging) {
        spar_status status;
        object->begun = number;
        Py_BEGIN_ALLOW_THREADS;
        status = spar_comm_run(comm, call);
        Py_END_ALLOW_THREADS;
        if (status != SPAR_OK)
            spar_raise(status);
    }
    if (PyErr_Occurred())
        Py_CLEAR(results);
    Py_XDECREF(staging);
    return results;
}

/* Runs a call whose tensors are on the device, which it makes the thread's current one meanwhile. */
static PyObject *run_on_device(comm_object *object, PyObject *const *args, int64_t number, spar_call *call)
{
    const spar_py_torch *torch = &object->torch;
    PyObject *before = PyObject_CallFunctionObjArgs(torch->enter, torch->index, NULL), *results = NULL;
    if (!before)
        return NULL;
    if (read_stream(torch, call) == 0)
        results = run_call(object, args, number, call);
    if (results && call->sum != SPAR_NO_SUM) {
        PyObject *rows = results;
        results = PyObject_CallFunctionObjArgs(torch->sums, rows, args[OUTS], NULL);
        Py_DECREF(rows);
    }
    if (PyLong_AsLong(before) != torch->ordinal) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject *left = PyObject_CallFunctionObjArgs(torch->leave, before, NULL);
        if (!left)
            PyErr_WriteUnraisable(torch->leave); /* the call is in the stream */
        Py_XDECREF(left);
        PyErr_Restore(type, value, trace);
    }
    Py_DECREF(before);
    return results;
}

/* Whether the inputs are on the communicator's device; if not, -1 and an exception. */
static int check_device(const spar_py_torch *torch, const spar_py_bound *bound, PyObject *inputs)
{
    int ordinal;
    if (spar_py_ordinal(spar_sequence_item(inputs, 0), bound->kind, &ordinal) < 0)
        return -1;
    if (ordinal == torch->ordinal)
        return 0;
    PyObject *raised = PyObject_CallFunction(torch->refuse, "si", bound->call->op, ordinal);
    Py_XDECREF(raised);
    return -1;
}

PyObject *spar_comm_py_enqueue(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    comm_object *object = (comm_object *)self;
    spar_py_torch torch = object->torch;
    PyObject *results = NULL;
    spar_call call = {.group = object->group};
    spar_py_bound bound;
    if (!spar_py_open_comm(self))
        return NULL;
    if (nargs != COUNT || !torch.bound)
        return PyErr_Format(PyExc_TypeError, "enqueue takes %d arguments, and got %zd; behind bind_torch()",
                            COUNT, nargs);
    int64_t number = PyLong_AsLongLong(args[NUMBER]);
    call.forward = PyLong_AsLongLong(args[FORWARD]);
    call.deadline = spar_py_deadline(self, PyFloat_AsDouble(args[DEADLINE]));
    if (PyErr_Occurred())
        return NULL;
    object->inside = 1; /* before torch's communicator is asked for: it is not aborted meanwhile */
    int other = spar_py_bind(&call, args[EXCHANGE], args[INPUTS], SPAR_SIDE_PULL,
                             PyObject_IsTrue(args[ALIKE]), &bound);
    if (other > 0) {
        results = Py_NewRef(Py_None);
    } else if (other == 0 && check_device(&torch, &bound, args[INPUTS]) == 0) {
        spar_status status = spar_py_find_plan(&bound);
        results = status == SPAR_OK ? run_on_device(object, args, number, &call) : spar_raise(status);
    }
    object->inside = 0;
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
