/* SPDX-License-Identifier: Apache-2.0 */
/* spar._C.Comm: one rank's part of a group. */
#include "python/comm.h"
#include "base/env.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

static PyTypeObject *comm_type;

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
    if (!*row || rank < 0 || rank >= world)
        return PyErr_Format(PyExc_ValueError, "transport '%s', rank %d of %d", name, rank, world);
    spar_peer_info *info = spar_py_peer_infos(bytes, size);
    comm_object *object = info ? PyObject_New(comm_object, comm_type) : NULL;
    if (!object) {
        free(info);
        return NULL;
    }
    object->comm = NULL;
    object->closing = object->begun = object->compared = 0;
    object->torch = (spar_py_torch){0};
    object->pool = NULL;
    object->inside = 0;
    snprintf(object->group, sizeof object->group, "%s", group);
    spar_status status;
    spar_env_read();
    Py_BEGIN_ALLOW_THREADS; /* it may ask a name server, or compile kernels */
    status =
        spar_comm_open(*row, info, world, rank, local_ranks, &native, &object->comm, &object->setup_result);
    Py_END_ALLOW_THREADS;
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
    spar_py_torch *torch = &((comm_object *)self)->torch;
    PyObject *bound = torch->bound; /* it has the channel, which has this object: no collector sees that */
    comm_close((comm_object *)self);
    *torch = (spar_py_torch){0};
    Py_XDECREF(bound);
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
    Py_XDECREF(((comm_object *)self)->torch.bound);
    Py_XDECREF(((comm_object *)self)->pool);
    PyObject_Free(self);
    Py_DECREF(type);
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
    spar_comm *comm = spar_py_open_comm(self);
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
        /* There are none until the set-up is over. */
        if (spar_group_words(comm->group, rank, &words))
            list = spar_list_add(list, rank_row(comm->group, rank, ((comm_object *)self)->group, words));
    return list;
}

static PyObject *comm_begun(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(((comm_object *)self)->begun);
}

static PyObject *comm_broken(PyObject *self, void *Py_UNUSED(closure))
{
    const spar_comm *comm = ((comm_object *)self)->comm;
    const char *why = comm && comm->transport->broken ? comm->transport->broken(comm) : NULL;
    return why ? spar_text(why) : Py_NewRef(Py_None);
}

static PyObject *comm_room(PyObject *self, void *Py_UNUSED(closure))
{
    const spar_comm *comm = ((comm_object *)self)->comm;
    return PyLong_FromLongLong(comm && comm->transport->room ? comm->transport->room(comm) : 0);
}

static PyObject *comm_captured(PyObject *self, void *Py_UNUSED(closure))
{
    const spar_comm *comm = ((comm_object *)self)->comm;
    return PyBool_FromLong(comm && comm->transport->captured && comm->transport->captured(comm));
}

static PyGetSetDef comm_getset[] = {
    {"broken", comm_broken, NULL, "what broke it behind the calls' back, or None", NULL},
    {"room", comm_room, NULL,
     "bytes of outputs with which a call needs no more of the group's memory; 0: any", NULL},
    {"captured", comm_captured, NULL, "whether a graph has a call", NULL},
    {"begun", comm_begun, NULL, "the number of the newest call that the transport has: it reports failures",
     NULL},
    {"pool", spar_comm_py_pool, spar_comm_py_set_pool,
     "what routes this thread's allocations by torch to memory that peers can write to: a tuple that begins\n"
     "with begin(), end() and release(), which enqueue calls around the outputs (outputs.h); or None",
     NULL},
    {"setup_result", comm_setup_result, NULL, "what all ranks must see of the newest stage, as bytes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef comm_members[] = {
    {"inside", T_BOOL, offsetof(comm_object, inside), READONLY, "whether enqueue is under way"},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef comm_methods[] = {
    {"connect", comm_connect, METH_VARARGS, "connect(all ranks' setup_result, deadline): second stage"},
    {"exchange", (PyCFunction)(void (*)(void))spar_comm_py_exchange, METH_FASTCALL, spar_py_exchange_doc},
    {"enqueue", (PyCFunction)(void (*)(void))spar_comm_py_enqueue, METH_FASTCALL, spar_py_enqueue_doc},
    {"bind_torch", spar_comm_py_bind_torch, METH_VARARGS, spar_py_bind_torch_doc},
    {"wait", spar_comm_py_wait, METH_VARARGS,
     "wait(deadline): returns when all that was given to a stream is over; raises what broke it."},
    {"compare", spar_comm_py_compare, METH_VARARGS,
     "compare(op, text, plan, forward, number, deadline): begin a call whose bytes the caller moves; return\n"
     "when all ranks make it. The peers know of what it raises."},
    {"poll", spar_comm_py_poll, METH_VARARGS,
     "poll(deadline): raise what ends the call that compare() began early; call it about every 50 ms."},
    {"end", spar_comm_py_end, METH_NOARGS, "The bytes of the call that compare() began have moved."},
    {"fail", spar_comm_py_fail, METH_VARARGS,
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
    {Py_tp_members, comm_members},
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
