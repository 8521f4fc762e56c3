/* SPDX-License-Identifier: Apache-2.0 */
/* spar._C.Turn, of which a group is a subclass: it runs the group's calls one at a time, and asks the group
 * for what is not usual: to set a channel up, and what an exception means for the peers. */
#include "python/turn.h"
#include "base/fork.h"
#include "base/util.h"

#include <stddef.h>
#include <structmember.h>
#include <unistd.h>

enum {
    LOCAL = 0,             /* of spar/_control/state.py */
    MOST_REMEMBERED = 256, /* keys of exchanges */
};

static PyTypeObject *turn_type;

/* The object of a field, or NULL also for None. */
static PyObject *held(PyObject *field)
{
    return field == Py_None ? NULL : field;
}

spar_turn *spar_py_turn_of(PyObject *object)
{
    if (PyObject_TypeCheck(object, turn_type))
        return (spar_turn *)object;
    PyErr_SetString(PyExc_TypeError, "expected a spar._C.Turn");
    return NULL;
}

long long spar_py_turn_count(PyObject *self)
{
    spar_turn *turn = (spar_turn *)self;
    if (!held(turn->queue))
        return turn->calls;
    PyObject *count = PyObject_CallMethod(self, "count", NULL);
    long long number = count ? PyLong_AsLongLong(count) : -1;
    Py_XDECREF(count);
    return number;
}

/* ---- around a call ---- */

/* Tells the group which exception ended a call; it stays, unless the group raises another. before: how many
 * calls there were before; NULL: the thread has not had its turn. */
static void report(PyObject *self, PyObject *const *args, PyObject *before, PyObject *deadline)
{
    PyObject *type, *error, *trace, *result, *op = args[SPAR_TURN_OP];
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    if (before)
        result = PyObject_CallMethod(self, "_fail_call", "OOOOO", op, args[SPAR_TURN_DEVICE], error, before,
                                     deadline);
    else
        result = PyObject_CallMethod(self, "_interrupt", "OO", op, error);
    if (result) {
        Py_DECREF(result);
        PyErr_Restore(type, error, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* Raises what a method of the group returns for an operation; returns NULL. */
static PyObject *raise_from(PyObject *self, const char *method, PyObject *op)
{
    PyObject *error = PyObject_CallMethod(self, method, "O", op);
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

/* Whether the process is the one that made the group. To ask for its id takes longer than to compare it. */
static int is_own_process(const spar_turn *turn)
{
    static uint32_t generation;
    static long process;
    if (generation != spar_generation()) {
        generation = spar_generation();
        process = (long)getpid();
    }
    return turn->process == process;
}

/* Whether torch.distributed still has the group; -1 and an exception on failure. */
static int is_registered(const spar_turn *turn)
{
    PyObject *registry = held(turn->registry), *group = held(turn->process_group);
    if (!registry)
        return 1;
    PyObject *alive = group ? PyObject_CallNoArgs(group) : Py_NewRef(Py_None);
    int found = alive ? PySequence_Contains(registry, alive) : -1;
    Py_XDECREF(alive);
    return found;
}

/* The end of the call, in seconds of time.monotonic; -1 and an exception on failure. */
static double deadline_of(PyObject *self)
{
    PyObject *timeout = held(((spar_turn *)self)->timeout);
    if (timeout)
        return (double)spar_now_ns() * 1e-9 + PyFloat_AsDouble(timeout);
    PyObject *deadline = PyObject_CallMethod(self, "deadline", NULL);
    double seconds = deadline ? PyFloat_AsDouble(deadline) : -1;
    Py_XDECREF(deadline);
    return seconds;
}

/* Waits for calls in flight, and for the turn; 0, or -1 and an exception. */
static int acquire(const spar_turn *turn, int queued)
{
    PyObject *done = NULL;
    if (held(turn->queue) && !queued) {
        PyObject *queue = Py_NewRef(turn->queue);
        done = PyObject_CallMethod(queue, "drain", NULL);
        Py_DECREF(queue);
        if (!done)
            return -1;
        Py_DECREF(done);
    }
    done = PyObject_CallNoArgs(turn->acquire);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Calls a function or a method of the group without arguments, beside an exception, which stays. */
static void call_beside(PyObject *self, PyObject *function, const char *method)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = function ? PyObject_CallNoArgs(function) : PyObject_CallMethod(self, method, NULL);
    if (!done && type) {
        PyErr_Clear();
    } else if (!done) {
        return;
    }
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* ---- a call ---- */

/* The channel of the call's device, which is set up if there is none; a new reference. */
static PyObject *channel_of(PyObject *self, PyObject *const *args, PyObject *deadline)
{
    PyObject *channel = PyDict_GetItemWithError(((spar_turn *)self)->channels, args[SPAR_TURN_DEVICE]);
    if (channel || PyErr_Occurred())
        return Py_XNewRef(channel);
    PyObject *first = PySequence_GetItem(args[SPAR_TURN_INPUTS], 0);
    PyObject *device = first ? PyObject_GetAttrString(first, "device") : NULL;
    if (device)
        channel = PyObject_CallMethod(self, "_set_up", "OOO", args[SPAR_TURN_OP], device, deadline);
    Py_XDECREF(first);
    Py_XDECREF(device);
    return channel;
}

/* What runs an exchange on a channel: the channel's own function, unless a profile or a log shows it. */
static PyObject *runner(PyObject *self, PyObject *channel)
{
    static PyObject *name;
    const spar_turn *turn = (spar_turn *)self;
    int shows = turn->logs_calls != 0;
    if (!shows) {
        PyObject *profiled = PyObject_CallNoArgs(turn->is_profiled);
        shows = profiled ? PyObject_IsTrue(profiled) : -1;
        Py_XDECREF(profiled);
    }
    if (shows)
        return shows > 0 ? PyObject_CallMethod(self, "_observed", "O", channel) : NULL;
    if (!name && !(name = PyUnicode_InternFromString("exchange")))
        return NULL;
    return PyObject_GetAttr(channel, name);
}

/* The number of the call whose gradient this one moves, or, in a forward of a view, the view's place. */
static PyObject *forward_of(const spar_turn *turn, PyObject *const *args, int queued)
{
    PyObject *forward = args[SPAR_TURN_FORWARD], *view = held(turn->view);
    int is_known = view ? PyObject_IsTrue(forward) : 1;
    if (is_known < 0)
        return NULL;
    return is_known || queued ? Py_NewRef(forward) : PyObject_GetAttrString(view, "word");
}

static PyObject *run_exchange(PyObject *self, PyObject *const *args, int queued, PyObject *deadline)
{
    spar_turn *turn = (spar_turn *)self;
    PyObject *channel = channel_of(self, args, deadline), *result = NULL;
    if (!channel)
        return NULL;
    if (args[SPAR_TURN_ALIKE] != Py_True && PyDict_Size(turn->exchanges) > MOST_REMEMBERED)
        PyDict_Clear(turn->exchanges);
    PyObject *newest = turn->newest;
    turn->newest = Py_NewRef(args[SPAR_TURN_CORE]);
    Py_XDECREF(newest);
    long long before = turn->calls++;
    PyObject *number = PyLong_FromLongLong(turn->calls);
    PyObject *forward = forward_of(turn, args, queued), *run = forward ? runner(self, channel) : NULL;
    if (number && run)
        result = PyObject_CallFunctionObjArgs(run, args[SPAR_TURN_CORE], args[SPAR_TURN_INPUTS],
                                              args[SPAR_TURN_OUTS], forward, args[SPAR_TURN_ALIKE], number,
                                              deadline, NULL);
    if (result == Py_None) /* it was no call */
        turn->calls = before;
    Py_XDECREF(run);
    Py_XDECREF(forward);
    Py_XDECREF(number);
    Py_DECREF(channel);
    return result;
}

/* Runs the call, whose turn it is. */
static PyObject *run_turn(PyObject *self, PyObject *const *args, int queued, double seconds)
{
    spar_turn *turn = (spar_turn *)self;
    PyObject *deadline = PyFloat_FromDouble(seconds), *result = NULL;
    long long before = turn->calls;
    turn->owner = PyThread_get_thread_ident();
    turn->progress = LOCAL;
    if (!deadline)
        result = NULL;
    else if (held(turn->broken))
        result = raise_from(self, "broken_error", args[SPAR_TURN_OP]);
    else if (args[SPAR_TURN_ACTION] != Py_None)
        result = PyObject_CallFunctionObjArgs(args[SPAR_TURN_ACTION], deadline, NULL);
    else
        result = run_exchange(self, args, queued, deadline);
    if (!result) {
        PyObject *count = PyLong_FromLongLong(before);
        if (count && deadline)
            report(self, args, count, deadline);
        Py_XDECREF(count);
    }
    turn->owner = 0;
    Py_XDECREF(deadline);
    return result;
}

PyObject *spar_py_take_turn(PyObject *self, PyObject *const *args)
{
    spar_turn *turn = (spar_turn *)self;
    int queued = PyObject_IsTrue(args[SPAR_TURN_QUEUED]);
    if (!turn->acquire) {
        PyErr_SetString(PyExc_TypeError, "only groups make calls");
        return NULL;
    }
    int refused = queued < 0 || !is_own_process(turn) || turn->owner == PyThread_get_thread_ident();
    if (!refused && !queued) {
        int registered = is_registered(turn);
        if (registered < 0)
            return NULL;
        refused = !registered;
    }
    if (refused)
        return PyErr_Occurred() ? NULL : raise_from(self, "_refusal", args[SPAR_TURN_OP]);
    double seconds = deadline_of(self);
    if (seconds < 0 && PyErr_Occurred())
        return NULL;
    PyObject *result = NULL;
    if (acquire(turn, queued) == 0) {
        result = run_turn(self, args, queued, seconds);
        call_beside(self, turn->release, NULL);
    } else {
        report(self, args, NULL, NULL);
    }
    if (turn->closes)
        call_beside(self, NULL, "_close_when_idle");
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    return result;
}

PyDoc_STRVAR(
    exchange_doc,
    "exchange(op, device, core, inputs, outs=None, forward=0, alike=False, queued=False, action=None)\n\n"
    "Run one exchange in its turn among this rank's calls on the group; set the group up if it is not.\n\n"
    "An exception is reported to the peers as the failure of this rank's call, or breaks the group.\n\n"
    "op: the operation's name. device: the type of the device where the call's tensors lie; None: unknown.\n"
    "core, inputs, outs, forward, alike: as in `Channel.exchange`. Where that returns None, it was no call.\n"
    "queued: it is the turn of a call in flight; others wait until none is before them. action: what\n"
    "`in_turn` runs instead. One function serves both, because an exchange enters few.");

static PyObject *turn_exchange(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static PyObject *zero;
    if (!zero && !(zero = PyLong_FromLong(0)))
        return NULL;
    PyObject *args[SPAR_TURN_ARGUMENTS] = {[SPAR_TURN_OUTS] = Py_None,
                                           [SPAR_TURN_FORWARD] = zero,
                                           [SPAR_TURN_ALIKE] = Py_False,
                                           [SPAR_TURN_QUEUED] = Py_False,
                                           [SPAR_TURN_ACTION] = Py_None};
    if (count <= SPAR_TURN_INPUTS || count > SPAR_TURN_ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "exchange takes 4 to %d arguments, and got %zd",
                            SPAR_TURN_ARGUMENTS, count);
    for (Py_ssize_t i = 0; i < count; i++)
        args[i] = given[i];
    return spar_py_take_turn(self, args);
}

/* ---- the object ---- */

static int turn_traverse(PyObject *self, visitproc visit, void *arg)
{
    spar_turn *turn = (spar_turn *)self;
    Py_VISIT(Py_TYPE(self));
#define VISIT(field, name) Py_VISIT(turn->field);
    SPAR_TURN_OBJECTS(VISIT)
    return 0;
}

static int turn_clear(PyObject *self)
{
    spar_turn *turn = (spar_turn *)self;
#define CLEAR(field, name) Py_CLEAR(turn->field);
    SPAR_TURN_OBJECTS(CLEAR)
    return 0;
}

static void turn_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    turn_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMethodDef turn_methods[] = {
    {"exchange", (PyCFunction)(void (*)(void))turn_exchange, METH_FASTCALL, exchange_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef turn_members[] = {
#define MEMBER(field, name) {name, T_OBJECT, offsetof(spar_turn, field), 0, NULL},
    SPAR_TURN_OBJECTS(MEMBER) /* of other types: */
    {"calls", T_LONGLONG, offsetof(spar_turn, calls), 0, NULL},
    {"process", T_LONG, offsetof(spar_turn, process), 0, NULL},
    {"progress", T_INT, offsetof(spar_turn, progress), 0, NULL},
    {"logs_calls", T_BOOL, offsetof(spar_turn, logs_calls), 0, NULL},
    {"_owner", T_ULONG, offsetof(spar_turn, owner), 0, "the thread whose call it is, or 0"},
    {"_closes", T_BOOL, offsetof(spar_turn, closes), 0, "whether the group is to be closed"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot turn_slots[] = {
    {Py_tp_doc, "The calls of a group on this rank, one at a time."},
    {Py_tp_dealloc, turn_dealloc},
    {Py_tp_traverse, turn_traverse},
    {Py_tp_clear, turn_clear},
    {Py_tp_methods, turn_methods},
    {Py_tp_members, turn_members},
    {0, NULL},
};

static PyType_Spec turn_spec = {
    .name = "spar._C.Turn",
    .basicsize = sizeof(spar_turn),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = turn_slots,
};

PyObject *spar_turn_type(void)
{
    if (!turn_type)
        turn_type = (PyTypeObject *)PyType_FromSpec(&turn_spec);
    return Py_XNewRef((PyObject *)turn_type);
}
