/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a spar._C.Comm: exchanges, and those whose bytes Python moves. */
#include "python/comm.h"

/* ---- waiting ---- */

static int must_stop(void *context)
{
    comm_object *self = context;
    PyGILState_STATE state = PyGILState_Ensure();
    int came = PyErr_CheckSignals(); /* only on the main thread */
    PyGILState_Release(state);
    if (came)
        return SPAR_STOP_SIGNAL;
    return __atomic_load_n(&self->closing, __ATOMIC_RELAXED) ? SPAR_STOP_CLOSED : SPAR_CONTINUE;
}

spar_deadline spar_py_deadline(PyObject *comm, double deadline_s)
{
    return (spar_deadline){.at_ns = (int64_t)(deadline_s * 1e9), .interrupted = must_stop, .context = comm};
}

spar_comm *spar_py_open_comm(PyObject *self)
{
    spar_comm *comm = ((comm_object *)self)->comm;
    if (!comm || __atomic_load_n(&((comm_object *)self)->closing, __ATOMIC_RELAXED)) {
        spar_fail(SPAR_BROKEN, "the group was closed on this rank");
        spar_raise(SPAR_BROKEN);
        return NULL;
    }
    return comm;
}

/* ---- exchanges ---- */

/* Reports the current exception to the peers as the failure of this rank's call; it stays set. */
static void report_exception(spar_comm *comm, spar_call *call)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *name = type ? PyObject_GetAttrString(type, "__name__") : NULL;
    PyObject *text = name ? PyUnicode_FromFormat("%U: %S", name, value) : NULL;
    const char *why = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    PyErr_Clear();
    call->failed = SPAR_INVALID;
    call->why = why ? why : "its arguments cannot be read";
    Py_BEGIN_ALLOW_THREADS;
    spar_comm_run(comm, call);
    Py_END_ALLOW_THREADS;
    Py_XDECREF(name);
    Py_XDECREF(text);
    /* A signal handler may have raised. */
    if (!PyErr_Occurred()) {
        PyErr_Restore(type, value, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

const char spar_py_exchange_doc[] = PyDoc_STR(
    "exchange(Exchange, inputs, targets, forward, alike, number, deadline) -> a list of the outputs\n\n"
    "inputs: tensors of one dtype. targets: a list of contiguous tensors for the outputs, or None. None\n"
    "is returned for those that were written there: sums, and outputs whose target lies in the arena;\n"
    "copy the others. number: of the call, by the group's own count. forward: that of the call whose\n"
    "gradient it moves, or 0. alike: do nothing and return None unless the inputs have the dtype, device\n"
    "and extents of those before. deadline: in seconds of time.monotonic.");

/* A list of all outputs, None for those without a block; it owns the blocks, also on failure. */
static PyObject *output_tensors(const spar_call *call, int dtype)
{
    const spar_plan *plan = call->plan;
    PyObject *tensors = PyList_New(plan->ntensors);
    for (int t = 0; t < plan->ntensors; t++) {
        PyObject *tensor =
            tensors ? spar_output_tensor(call->blocks[t], &plan->tensors[t], call->sum != SPAR_NO_SUM, dtype)
                    : NULL;
        if (!tensors && call->blocks[t])
            spar_memory_free(call->blocks[t]);
        else if (tensors && (!tensor || PyList_SetItem(tensors, t, tensor) < 0))
            Py_CLEAR(tensors);
    }
    return tensors;
}

/* Stores the addresses of a call's targets; -1 and an exception for another number of them. */
static int read_targets(PyObject *tensors, int count, void **addresses)
{
    if (spar_sequence_size(tensors) != count) {
        PyErr_Format(PyExc_ValueError, "%zd targets for %d outputs", spar_sequence_size(tensors), count);
        return -1;
    }
    for (int t = 0; t < count; t++)
        if (spar_py_address(spar_sequence_item(tensors, t), &addresses[t]) < 0)
            return -1;
    return 0;
}

PyObject *spar_comm_py_exchange(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { EXCHANGE, INPUTS, TARGETS, FORWARD, ALIKE, NUMBER, DEADLINE, COUNT };
    spar_comm *comm = spar_py_open_comm(self);
    if (!comm)
        return NULL;
    if (nargs != COUNT)
        return PyErr_Format(PyExc_TypeError, "exchange takes %d arguments, not %zd", COUNT, nargs);
    long long forward = PyLong_AsLongLong(args[FORWARD]), number = PyLong_AsLongLong(args[NUMBER]);
    double deadline_s = PyFloat_AsDouble(args[DEADLINE]);
    int alike = PyObject_IsTrue(args[ALIKE]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *result = NULL;
    void *targets[SPAR_GROUP_TENSORS], *outputs[SPAR_GROUP_TENSORS] = {NULL};
    spar_memory *blocks[SPAR_GROUP_TENSORS] = {NULL};
    spar_call call = {.outputs = outputs,
                      .blocks = blocks,
                      .targets = args[TARGETS] != Py_None ? targets : NULL,
                      .number = number,
                      .forward = forward,
                      .deadline = spar_py_deadline(self, deadline_s),
                      .group = ((comm_object *)self)->group};
    spar_py_bound bound;
    int other =
        spar_py_bind(&call, args[EXCHANGE], args[INPUTS], comm->nfar ? SPAR_SIDE_PULL : 0, alike, &bound);
    if (other > 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    ((comm_object *)self)->begun = number; /* whatever fails from here on is reported to the peers */
    if (other < 0 || (call.targets && read_targets(args[TARGETS], bound.request.ntensors, targets) < 0)) {
        report_exception(comm, &call);
        goto done;
    }
    spar_status status;
    call.failed = spar_py_find_plan(&bound);
    call.why = spar_last_error();
    Py_BEGIN_ALLOW_THREADS;
    status = spar_comm_run(comm, &call);
    Py_END_ALLOW_THREADS;
    if (status == SPAR_OK)
        result = output_tensors(&call, bound.dtype);
    else
        spar_raise(status);
done:
    spar_py_unbind(&bound);
    return result;
}

PyObject *spar_comm_py_compare(PyObject *self, PyObject *args)
{
    spar_comm *comm = spar_py_open_comm(self);
    PyObject *plan;
    double deadline_s;
    long long forward, number;
    spar_call call = {.group = ((comm_object *)self)->group};
    if (!comm ||
        !PyArg_ParseTuple(args, "ssOLLd", &call.op, &call.text, &plan, &forward, &number, &deadline_s))
        return NULL;
    call.plan = spar_py_plan_of(plan);
    call.forward = forward;
    call.number = number;
    call.deadline = spar_py_deadline(self, deadline_s);
    if (!call.plan)
        return NULL;
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_comm_run(comm, &call);
    Py_END_ALLOW_THREADS;
    ((comm_object *)self)->begun = status == SPAR_OK ? 0 : number; /* from here on the caller fails alone */
    ((comm_object *)self)->compared = number;
    return spar_result(status);
}

/* The group of a call that goes on, also while another thread closes it; or NULL and an exception. */
static spar_group *compared_group(PyObject *self)
{
    spar_comm *comm = ((comm_object *)self)->comm;
    if (!comm || !comm->group)
        PyErr_SetString(PyExc_RuntimeError, "its ranks have no mailboxes");
    return comm ? comm->group : NULL;
}

PyObject *spar_comm_py_poll(PyObject *self, PyObject *args)
{
    spar_group *group = compared_group(self);
    double deadline_s;
    if (!group || !PyArg_ParseTuple(args, "d", &deadline_s))
        return NULL;
    spar_deadline deadline = spar_py_deadline(self, deadline_s);
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_group_poll(group, &deadline);
    Py_END_ALLOW_THREADS;
    if (status != SPAR_OK) /* the peers learn of it */
        ((comm_object *)self)->begun = ((comm_object *)self)->compared;
    return spar_result(status);
}

PyObject *spar_comm_py_end(PyObject *self, PyObject *Py_UNUSED(unused))
{
    spar_group *group = compared_group(self);
    if (!group)
        return NULL;
    spar_group_end(group);
    Py_RETURN_NONE;
}

PyObject *spar_comm_py_fail(PyObject *self, PyObject *args)
{
    spar_comm *comm = spar_py_open_comm(self);
    const char *op, *why;
    int memory, for_good;
    double deadline_s;
    if (!comm || !PyArg_ParseTuple(args, "ssppd", &op, &why, &memory, &for_good, &deadline_s))
        return NULL;
    spar_call call = {.failed = for_good ? SPAR_INTERRUPTED
                                : memory ? SPAR_NO_MEMORY
                                         : SPAR_INVALID,
                      .why = why,
                      .deadline = spar_py_deadline(self, deadline_s),
                      .group = ((comm_object *)self)->group,
                      .op = op};
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_comm_run(comm, &call);
    Py_END_ALLOW_THREADS;
    return spar_result(status == call.failed ? SPAR_OK : status); /* the failure itself was requested */
}
