/* The module spar._C. */
#include "binding.h"
#include "env.h"

#include <stdlib.h>
#include <string.h>

PyObject *spar_raise(spar_status status)
{
    static const char *const classes[] = {
        [SPAR_NO_MEMORY] = "OutOfMemoryError",   [SPAR_MISMATCH] = "MismatchError",
        [SPAR_TIMEOUT] = "ExchangeTimeoutError", [SPAR_PEER_LOST] = "PeerLostError",
        [SPAR_BROKEN] = "GroupBrokenError",      [SPAR_TRANSPORT] = "TransportError",
        [SPAR_INTERNAL] = "SparError",
    };
    if (status == SPAR_INVALID || status == SPAR_TYPE) {
        PyErr_SetString(status == SPAR_TYPE ? PyExc_TypeError : PyExc_ValueError,
                        spar_last_error());
        return NULL;
    }
    PyObject *errors = PyImport_ImportModule("spar.errors");
    PyObject *class = errors ? PyObject_GetAttrString(errors, classes[status]) : NULL;
    if (class)
        PyErr_SetString(class, spar_last_error());
    Py_XDECREF(class);
    Py_XDECREF(errors);
    return NULL;
}

static PyObject *module_facts(PyObject *module, PyObject *unused)
{
    spar_facts facts;
    (void)module;
    (void)unused;
    spar_facts_read(&facts);
    return PyBytes_FromStringAndSize((const char *)&facts, sizeof facts);
}

static PyObject *choice_to_tuple(const spar_choice *choice)
{
    PyObject *rejected = PyTuple_New(choice->rejected);
    for (int i = 0; rejected && i < choice->rejected; i++) {
        PyObject *row = Py_BuildValue("ss", choice->rejected_names[i], choice->rejected_reasons[i]);
        if (!row || PyTuple_SetItem(rejected, i, row) < 0)
            Py_CLEAR(rejected);
    }
    return rejected ? Py_BuildValue("ssN", choice->transport->name, choice->reason, rejected)
                    : NULL;
}

static PyObject *module_choose(PyObject *module, PyObject *args)
{
    const char *bytes, *device;
    PyObject *refusals;
    Py_ssize_t size;
    spar_choice choice;
    spar_refusal refused = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y#sO!", &bytes, &size, &device, &PyTuple_Type, &refusals))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(refusals) && i < 16; i++, refused.count++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(refusals, i), "ss", &refused.names[i],
                              &refused.reasons[i]))
            return NULL;
    if (size == 0 || size % (Py_ssize_t)sizeof(spar_facts) != 0)
        return PyErr_Format(PyExc_ValueError, "facts of %zd bytes; expected a multiple of %zu",
                            size, sizeof(spar_facts));
    spar_facts *facts = malloc((size_t)size); /* the bytes may not be aligned */
    if (!facts)
        return PyErr_NoMemory();
    memcpy(facts, bytes, (size_t)size);
    spar_status status =
        spar_choose(facts, (int)(size / (Py_ssize_t)sizeof *facts), device, &refused, &choice);
    free(facts);
    return status == SPAR_OK ? choice_to_tuple(&choice) : spar_raise(status);
}

static PyObject *module_env(PyObject *module, PyObject *args)
{
    const char *field, *value;
    (void)module;
    if (!PyArg_ParseTuple(args, "s", &field))
        return NULL;
    spar_status status = spar_env_field(field, &value);
    return status == SPAR_OK ? PyUnicode_FromString(value) : spar_raise(status);
}

static PyObject *module_env_rows(PyObject *module, PyObject *unused)
{
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (const spar_env_row *row = spar_env_rows; list && row->field; row++) {
        PyObject *item =
            Py_BuildValue("sssss", row->field, row->variable, row->kind, row->fallback, row->help);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *module_ops(PyObject *module, PyObject *unused)
{
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (const spar_op *const *op = spar_ops; list && *op; op++) {
        PyObject *item = Py_BuildValue("sss", (*op)->name, (*op)->inverse, (*op)->args);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *module_transports(PyObject *module, PyObject *unused)
{
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (const spar_transport *const *row = spar_transports; list && *row; row++) {
        PyObject *item = PyUnicode_FromString((*row)->name);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *module_plan_stats(PyObject *module, PyObject *unused)
{
    spar_plan_stats stats;
    (void)module;
    (void)unused;
    spar_plan_cache_stats(&stats);
    return Py_BuildValue("LLL", (long long)stats.cached, (long long)stats.hits,
                         (long long)stats.misses);
}

static PyObject *module_plan_limit(PyObject *module, PyObject *args)
{
    long long capacity;
    (void)module;
    if (!PyArg_ParseTuple(args, "L", &capacity))
        return NULL;
    if (capacity < 0)
        return PyErr_Format(PyExc_ValueError, "a cache of %lld plans", capacity);
    spar_plan_cache_limit(capacity);
    Py_RETURN_NONE;
}

static PyObject *module_arena_stats(PyObject *module, PyObject *unused)
{
    spar_arena_stats s;
    (void)module;
    (void)unused;
    spar_arena_read_stats(&s);
    return Py_BuildValue("LLLLLL", (long long)s.cap, (long long)s.reserved, (long long)s.allocated,
                         (long long)s.peak, (long long)s.quarantined, (long long)s.returned);
}

static PyObject *module_arena_trim(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLongLong((long long)spar_arena_trim());
}

static PyMethodDef methods[] = {
    {"plan", spar_py_plan, METH_VARARGS, spar_py_plan_doc},
    {"comm", spar_py_comm, METH_VARARGS, spar_py_comm_doc},
    {"arena_stats", module_arena_stats, METH_NOARGS,
     "(cap, reserved, allocated, peak, quarantined, returned), in bytes"},
    {"arena_trim", module_arena_trim, METH_NOARGS, "Gives free pages back; how many bytes."},
    {"facts", module_facts, METH_NOARGS, "What this rank tells all others about itself, as bytes."},
    {"choose", module_choose, METH_VARARGS,
     "choose(all ranks' facts, device, ((refused name, reason), ...))\n"
     "    -> (name, reason, ((rejected name, reason), ...))"},
    {"env", module_env, METH_VARARGS, "env(field) -> the variable's value as text, or its default"},
    {"env_rows", module_env_rows, METH_NOARGS, "[(field, variable, kind, default, help), ...]"},
    {"ops", module_ops, METH_NOARGS, "[(name, inverse, args), ...]"},
    {"transports", module_transports, METH_NOARGS, "Names, in the order of preference."},
    {"plan_stats", module_plan_stats, METH_NOARGS, "(cached, hits, misses)"},
    {"plan_limit", module_plan_limit, METH_VARARGS, "How many plans are kept from now on."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "spar._C",  .m_doc = "spar's C library.",
    .m_size = -1,          .m_methods = methods,
};

PyMODINIT_FUNC PyInit__C(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    PyObject *plan = spar_plan_type(), *comm = spar_comm_type();
    if (!plan || !comm || PyModule_AddObjectRef(module, "Plan", plan) < 0 ||
        PyModule_AddObjectRef(module, "Comm", comm) < 0 ||
        PyModule_AddStringConstant(module, "version", SPAR_VERSION) < 0 ||
        PyModule_AddIntConstant(module, "SIDE_PULL", SPAR_SIDE_PULL) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
