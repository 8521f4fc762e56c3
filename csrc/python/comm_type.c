/* SPDX-License-Identifier: Apache-2.0 */
/* spar._C.Comm: one rank's part of a group. */
#include "python/binding.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    char group[64];   /* for messages */
    int closing;      /* atomic: a call in progress must end */
    int64_t begun;    /* the number of the newest call that the transport has */
    int64_t compared; /* the number of the newest call that comm_compare began */
    spar_comm *comm;
    spar_setup_result setup_result;
} comm_object;

static PyTypeObject *comm_type;

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

/* ---- set-up ---- */

const char spar_py_comm_doc[] = PyDoc_STR(
    "comm(transport, peer_info, rank, local_ranks, group, ordinal=0, native=0) -> Comm\n\n"
    "First stage; see setup_result. On device `ordinal`; native: torch's ncclComm_t, if it has one.");

PyObject *spar_py_comm(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name, *bytes, *group;
    Py_ssize_t size;
    int rank, local_ranks;
    unsigned long long comm = 0;
    spar_native native = {0};
    const spar_transport *const *row = spar_transports;
    if (!PyArg_ParseTuple(args, "sy#iis|iK", &name, &bytes, &size, &rank, &local_ranks, &group,
                          &native.ordinal, &comm))
        return NULL;
    native.comm = (void *)(uintptr_t)comm;
    while (*row && strcmp((*row)->name, name) != 0)
        row++;
    int world = (int)(size / (Py_ssize_t)sizeof(spar_peer_info));
    if (!*row || size % (Py_ssize_t)sizeof(spar_peer_info) || rank < 0 || rank >= world)
        return PyErr_Format(PyExc_ValueError, "transport '%s', rank %d, facts of %zd bytes", name, rank,
                            size);
    spar_peer_info *info = malloc((size_t)size);
    comm_object *object = info ? PyObject_New(comm_object, comm_type) : NULL;
    if (!object) {
        free(info);
        return PyErr_NoMemory();
    }
    object->comm = NULL;
    object->closing = object->begun = object->compared = 0;
    snprintf(object->group, sizeof object->group, "%s", group);
    memcpy(info, bytes, (size_t)size);
    spar_status status =
        spar_comm_open(*row, info, world, rank, local_ranks, &native, &object->comm, &object->setup_result);
    free(info);
    if (status == SPAR_OK)
        return (PyObject *)object;
    Py_DECREF(object);
    return spar_raise(status);
}

static void comm_close(comm_object *self)
{
    spar_comm *comm = self->comm;
    self->comm = NULL;
    if (comm)
        spar_comm_close(comm);
}

static PyObject *comm_close_method(PyObject *self, PyObject *Py_UNUSED(unused))
{
    comm_close((comm_object *)self);
    Py_RETURN_NONE;
}

static PyObject *comm_abort(PyObject *self, PyObject *Py_UNUSED(unused))
{
    __atomic_store_n(&((comm_object *)self)->closing, 1, __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static void comm_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    comm_close((comm_object *)self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static spar_comm *open_comm(PyObject *self)
{
    spar_comm *comm = ((comm_object *)self)->comm;
    if (!comm || __atomic_load_n(&((comm_object *)self)->closing, __ATOMIC_RELAXED)) {
        spar_fail(SPAR_BROKEN, "the group was closed on this rank");
        spar_raise(SPAR_BROKEN);
        return NULL;
    }
    return comm;
}

static PyObject *comm_setup_result(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize((const char *)&((comm_object *)self)->setup_result,
                                     sizeof(spar_setup_result));
}

static PyObject *comm_connect(PyObject *self, PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    double deadline_s;
    spar_comm *comm = open_comm(self);
    if (!comm || !PyArg_ParseTuple(args, "y#d", &bytes, &size, &deadline_s))
        return NULL;
    if (size != comm->world * (Py_ssize_t)sizeof(spar_setup_result))
        return PyErr_Format(PyExc_ValueError, "verdicts of %zd bytes for %d ranks", size, comm->world);
    spar_setup_result *results = malloc((size_t)size);
    if (!results)
        return PyErr_NoMemory();
    memcpy(results, bytes, (size_t)size);
    spar_deadline deadline = spar_py_deadline(self, deadline_s);
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_comm_connect(comm, results, &deadline, &((comm_object *)self)->setup_result);
    Py_END_ALLOW_THREADS;
    free(results);
    return spar_result(status);
}

/* ---- a call ---- */

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
    if (!PyErr_Occurred()) { /* else a signal handler raised */
        PyErr_Restore(type, value, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

PyDoc_STRVAR(
    exchange_doc,
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

static PyObject *comm_exchange(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { EXCHANGE, INPUTS, TARGETS, FORWARD, ALIKE, NUMBER, DEADLINE, COUNT };
    spar_comm *comm = open_comm(self);
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

static PyObject *comm_compare(PyObject *self, PyObject *args)
{
    spar_comm *comm = open_comm(self);
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

static PyObject *comm_poll(PyObject *self, PyObject *args)
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

static PyObject *comm_end(PyObject *self, PyObject *Py_UNUSED(unused))
{
    spar_group *group = compared_group(self);
    if (!group)
        return NULL;
    spar_group_end(group);
    Py_RETURN_NONE;
}

static PyObject *comm_fail(PyObject *self, PyObject *args)
{
    spar_comm *comm = open_comm(self);
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

/* A row of comm_ranks. */
static PyObject *rank_row(const spar_group *group, int rank, const char *name, spar_words words)
{
    const spar_last_call last = spar_group_last_call(group, rank);
    const spar_description *description = spar_group_description(group, rank);
    return Py_BuildValue("IIzzN(iNIN)N", words.published, words.done, spar_exception_name(words.broken),
                         spar_exception_name(words.status), PyBool_FromLong(words.ended), (int)last.state,
                         spar_text(last.op), (unsigned int)last.call,
                         spar_text(*last.group ? last.group : name),
                         description ? spar_py_description(description) : Py_NewRef(Py_None));
}

static PyObject *comm_ranks(PyObject *self, PyObject *Py_UNUSED(unused))
{
    const spar_comm *comm = ((comm_object *)self)->comm;
    PyObject *list = PyList_New(0);
    spar_words words;
    for (int rank = 0; list && comm && comm->group && rank < comm->world; rank++)
        if (spar_group_words(comm->group, rank, &words)) /* else the set-up is not over */
            list = spar_list_add(list, rank_row(comm->group, rank, ((comm_object *)self)->group, words));
    return list;
}

static PyObject *comm_enqueue(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    comm_object *object = (comm_object *)self;
    spar_comm *comm = open_comm(self);
    return comm ? spar_py_enqueue(comm, self, object->group, args, nargs, &object->begun) : NULL;
}

static PyObject *comm_begun(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(((comm_object *)self)->begun);
}

static PyObject *comm_wait(PyObject *self, PyObject *args)
{
    spar_comm *comm = open_comm(self);
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

static PyObject *comm_broken(PyObject *self, void *Py_UNUSED(closure))
{
    const spar_comm *comm = ((comm_object *)self)->comm;
    const char *why = comm && comm->transport->broken ? comm->transport->broken(comm) : NULL;
    return why ? spar_text(why) : Py_NewRef(Py_None);
}

static PyGetSetDef comm_getset[] = {
    {"broken", comm_broken, NULL, "what broke it behind the calls' back, or None", NULL},
    {"begun", comm_begun, NULL, "the number of the newest call that the transport has: it reports failures",
     NULL},
    {"setup_result", comm_setup_result, NULL, "what all ranks must see of the newest stage, as bytes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef comm_methods[] = {
    {"connect", comm_connect, METH_VARARGS, "connect(all ranks' setup_result, deadline)"},
    {"exchange", (PyCFunction)(void (*)(void))comm_exchange, METH_FASTCALL, exchange_doc},
    {"enqueue", (PyCFunction)(void (*)(void))comm_enqueue, METH_FASTCALL, spar_py_enqueue_doc},
    {"wait", comm_wait, METH_VARARGS,
     "wait(deadline): returns when all that was given to a stream is over; raises what broke it."},
    {"compare", comm_compare, METH_VARARGS,
     "compare(op, text, plan, forward, number, deadline): begin a call whose bytes the caller moves; return\n"
     "when all ranks make it. The peers know of what it raises."},
    {"poll", comm_poll, METH_VARARGS,
     "poll(deadline): raise what ends the call that compare() began early; call it about every 50 ms."},
    {"end", comm_end, METH_NOARGS, "The bytes of the call that compare() began have moved."},
    {"fail", comm_fail, METH_VARARGS,
     "fail(op, why, memory, for_good, deadline): report to the peers that this rank cannot make its next\n"
     "call (for want of memory, or otherwise), or any call."},
    {"abort", comm_abort, METH_NOARGS,
     "End a call under way on another thread, or around a signal's handler: it raises GroupBrokenError\n"
     "within 50 ms. For good; close() follows."},
    {"ranks", comm_ranks, METH_NOARGS,
     "ranks() -> [(published, done, broken, failed, ended, last call, description), ...]\n\n"
     "Of each rank: its newest calls; the names of the exceptions with which it broke the group, or failed\n"
     "the published call, or None; whether its process has ended; (state, op, call, group) of the newest\n"
     "call that its process began, on any group, where state is one of the CALL_ constants; and, if the\n"
     "newest call ended in a mismatch, what Plan.describe returns. Empty without mailboxes. Any thread may\n"
     "call it, also during a call."},
    {"close", comm_close_method, METH_NOARGS, "Says goodbye; never waits."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_doc, "A rank's part in a group."},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_getset, comm_getset},
    {Py_tp_methods, comm_methods},
    {0, NULL},
};

static PyType_Spec comm_spec = {
    .name = "spar._C.Comm",
    .basicsize = sizeof(comm_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = comm_slots,
};

PyObject *spar_comm_type(void)
{
    comm_type = (PyTypeObject *)PyType_FromSpec(&comm_spec);
    return (PyObject *)comm_type;
}
