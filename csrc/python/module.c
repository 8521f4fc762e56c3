/* SPDX-License-Identifier: Apache-2.0 */
/* The module spar._C. */
#include "python/binding.h"
#include "python/turn.h"
#include "python/view.h"
#include "base/cgroup.h"
#include "base/cores.h"
#include "base/env.h"
#include "ops/balance.h"
#include "transports/nccl/pipeline.h"
#include "base/dynlib.h"
#include "devices/cpu/threads.h"
#include "devices/cuda/cuda.h"
#include "devices/cuda/outputs.h"
#include "control/last_call.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static PyObject *module_env(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *field;
    spar_env_value value;
    if (!PyArg_ParseTuple(args, "s", &field))
        return NULL;
    spar_env_read();
    spar_status status = spar_env_field(field, &value);
    if (status != SPAR_OK)
        return spar_raise(status);
    switch (value.holds) {
    case SPAR_ENV_UNSET:
        Py_RETURN_NONE;
    case SPAR_ENV_SECONDS:
        return PyFloat_FromDouble(value.seconds);
    case SPAR_ENV_COUNT:
        return PyLong_FromLongLong((long long)value.count);
    case SPAR_ENV_TEXT:
        break;
    }
    return PyUnicode_FromString(value.text);
}

static PyObject *module_env_rows(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (const spar_env_row *row = spar_env_rows; list && row->field; row++)
        list = spar_list_add(
            list, Py_BuildValue("sssss", row->field, row->variable, row->kind, row->fallback, row->help));
    return list;
}

static PyObject *module_scale_types(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int code = 1; list && code < SPAR_SCALE_TYPES; code++)
        list = spar_list_add(list, Py_BuildValue("si", spar_scale_types[code].torch_name, code));
    return list;
}

static PyObject *module_sum_types(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (const spar_sum_type *row = spar_sum_types; list && row->torch_name; row++)
        list = spar_list_add(list, Py_BuildValue("si", row->torch_name, (int)row->kind));
    return list;
}

static PyObject *module_traffic(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (const spar_transport *const *row = spar_transports; list && *row; row++) {
        spar_traffic found = spar_traffic_of(*row);
        list =
            spar_list_add(list, Py_BuildValue("sKKK", (*row)->name, (unsigned long long)found.calls,
                                              (unsigned long long)found.bytes, (unsigned long long)found.ns));
    }
    return list;
}

static PyObject *module_count_traffic(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    unsigned long long bytes, ns;
    if (!PyArg_ParseTuple(args, "sKK", &name, &bytes, &ns))
        return NULL;
    for (const spar_transport *const *row = spar_transports; *row; row++)
        if (strcmp((*row)->name, name) == 0) {
            spar_traffic_count(*row, bytes, ns);
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "no transport is called '%s'", name);
}

PyDoc_STRVAR(table_doc,
             "table(address, world, sequences, rank) -> (least, own, numbers)\n\n"
             "Of what each rank holds of each of several packed sequences, int64 [world][sequences]:\n"
             "the least entry, what `rank` holds, and the numbers that tell the core all: the sequences'\n"
             "lengths where the size rule cuts them, else the table.");

static PyObject *module_table(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long address;
    int world, rank;
    long long sequences;
    int64_t least, held;
    if (!PyArg_ParseTuple(args, "KiLi", &address, &world, &sequences, &rank))
        return NULL;
    const int64_t *table = (const int64_t *)(uintptr_t)address;
    int64_t *lengths = calloc((size_t)sequences + 1, sizeof *lengths);
    if (!lengths)
        return PyErr_NoMemory();
    int by_rule = spar_packed_lengths(table, world, sequences, rank, lengths, &least, &held);
    PyObject *tuple =
        spar_ints_to_tuple(by_rule ? lengths : table, (Py_ssize_t)(by_rule ? sequences : world * sequences));
    free(lengths);
    return tuple ? Py_BuildValue("LLN", (long long)least, (long long)held, tuple) : NULL;
}

PyDoc_STRVAR(balance_doc, "balance(lengths, world, tolerance) -> the numbers of a layout\n\n"
                          "Assigns documents of these lengths, in a tuple, to ranks: csrc/ops/balance.h.");

static PyObject *module_balance(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *lengths;
    int world;
    double tolerance;
    int64_t *numbers = NULL, count = 0;
    if (!PyArg_ParseTuple(args, "O!id", &PyTuple_Type, &lengths, &world, &tolerance))
        return NULL;
    Py_ssize_t documents = PyTuple_Size(lengths);
    int64_t *read = calloc((size_t)documents + 1, sizeof *read);
    if (!read)
        return PyErr_NoMemory();
    if (spar_read_ints(lengths, read, documents) < 0) {
        free(read);
        return NULL;
    }
    spar_status status = spar_balance(read, documents, world, tolerance, &numbers, &count);
    PyObject *tuple = status == SPAR_OK ? spar_ints_to_tuple(numbers, (Py_ssize_t)count) : spar_raise(status);
    free(read);
    free(numbers);
    return tuple;
}

static PyObject *module_plan_stats(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    spar_plan_stats stats;
    spar_plan_cache_stats(&stats);
    return Py_BuildValue("LLL", (long long)stats.cached, (long long)stats.hits, (long long)stats.misses);
}

static PyObject *module_plan_limit(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long capacity;
    if (!PyArg_ParseTuple(args, "L", &capacity))
        return NULL;
    if (capacity < 0)
        return PyErr_Format(PyExc_ValueError, "a cache of %lld plans", capacity);
    spar_plan_cache_limit(capacity);
    Py_RETURN_NONE;
}

static PyObject *module_threads(PyObject *Py_UNUSED(module), PyObject *args)
{
    int most, share;
    spar_env_value wanted;
    if (!PyArg_ParseTuple(args, "ii", &most, &share))
        return NULL;
    spar_env_read();
    spar_status status = spar_env_field("threads", &wanted);
    if (status != SPAR_OK)
        return spar_raise(status);
    int64_t asked = wanted.holds ? wanted.count : share < most ? share : most;
    spar_threads_limit(asked < INT_MAX ? (int)asked : INT_MAX);
    return PyLong_FromLong(spar_threads_share(INT64_MAX));
}

static PyObject *module_limits(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("iL", spar_cores(), (long long)spar_usable_memory());
}

static PyObject *module_last_call_begin(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *group, *op;
    unsigned int call;
    if (!PyArg_ParseTuple(args, "ssI", &group, &op, &call))
        return NULL;
    return PyLong_FromUnsignedLong(spar_last_call_begin(group, op, call));
}

static PyObject *module_last_call_end(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int sequence;
    int gave_up;
    if (!PyArg_ParseTuple(args, "Ip", &sequence, &gave_up))
        return NULL;
    spar_last_call_end(sequence, gave_up);
    Py_RETURN_NONE;
}

static PyObject *module_arena_stats(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    spar_arena_stats s;
    spar_arena_read_stats(&s);
    return Py_BuildValue("LLLLLL", (long long)s.cap, (long long)s.reserved, (long long)s.allocated,
                         (long long)s.peak, (long long)s.quarantined, (long long)s.returned);
}

static PyObject *module_arena_trim(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int64_t returned;
    Py_BEGIN_ALLOW_THREADS;
    returned = spar_arena_trim();
    spar_peers_sweep();
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong((long long)returned);
}

static PyObject *module_arena_take(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long bytes;
    spar_memory *block = NULL;
    spar_status status;
    if (!PyArg_ParseTuple(args, "L", &bytes))
        return NULL;
    if (bytes < 0)
        return PyErr_Format(PyExc_ValueError, "%lld bytes", bytes);
    Py_BEGIN_ALLOW_THREADS;
    status = spar_arena_take(bytes, &block);
    Py_END_ALLOW_THREADS;
    if (status != SPAR_OK)
        return spar_raise(status);
    return spar_output_tensor(block, &(spar_plan_tensor){.item_size = 1, .ndim = 1, .out = {bytes}}, 0, 0);
}

static PyObject *module_in_arena(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address))
        return NULL;
    return PyBool_FromLong(spar_arena_has((const void *)(uintptr_t)address));
}

static PyObject *module_in_slot(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address))
        return NULL;
    return PyBool_FromLong(spar_outputs_any_has((const void *)(uintptr_t)address));
}

static PyObject *module_device_stats(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int64_t peak, total, slots, outputs;
    spar_staging_stats(&peak, &total);
    spar_outputs_stats(&slots, &outputs);
    return Py_BuildValue("LLLL", (long long)peak, (long long)total, (long long)slots, (long long)outputs);
}

static PyObject *module_set_side_stream(PyObject *Py_UNUSED(module), PyObject *args)
{
    int ordinal;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "iK", &ordinal, &stream))
        return NULL;
    return spar_result(spar_cuda_set_side_stream(ordinal, (void *)(uintptr_t)stream));
}

static PyObject *module_set_library_path(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *library, *path;
    if (!PyArg_ParseTuple(args, "sz", &library, &path))
        return NULL;
    spar_dynlib_set_path(library, path);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"comm", spar_py_comm, METH_VARARGS, spar_py_comm_doc},
    {"use_torch", spar_py_use_torch, METH_VARARGS, spar_py_use_torch_doc},
    {"arena_stats", module_arena_stats, METH_NOARGS,
     "(cap, reserved, allocated, peak, quarantined, returned), in bytes"},
    {"arena_trim", module_arena_trim, METH_NOARGS, "Gives free pages back; how many bytes."},
    {"arena_take", module_arena_take, METH_VARARGS,
     "arena_take(bytes) -> a tensor of that many bytes of the arena, for an exchange's targets"},
    {"in_arena", module_in_arena, METH_VARARGS, "in_arena(address) -> whether it lies in the arena"},
    {"in_slot", module_in_slot, METH_VARARGS, "in_slot(address) -> whether it lies in a slot of push"},
    {"device_stats", module_device_stats, METH_NOARGS,
     "(peak, total) of the staging memory of calls on GPUs, and (memory for outputs, in use) in slots of\n"
     "push, in bytes"},
    {"set_side_stream", module_set_side_stream, METH_VARARGS,
     "set_side_stream(ordinal, stream): calls in this stream run beside others' kernels, on fewer SMs"},
    {"set_library_path", module_set_library_path, METH_VARARGS,
     "set_library_path(library, path or None): where \"libnccl\" or \"libnvrtc\" lies in a package."},
    {"last_call_begin", module_last_call_begin, METH_VARARGS,
     "last_call_begin(group, op, call) -> sequence: this process's peers may see that it is in this call."},
    {"last_call_end", module_last_call_end, METH_VARARGS,
     "last_call_end(sequence, gave_up): the call of this sequence has ended, badly or well."},
    {"env", module_env, METH_VARARGS,
     "env(field) -> the variable's value or its default: float, int or str; None where both are empty"},
    {"env_rows", module_env_rows, METH_NOARGS, "[(field, variable, kind, default, help), ...]"},
    {"scale_types", module_scale_types, METH_NOARGS,
     "[(name of a torch dtype, its code), ...]: the dtypes that a copy can scale."},
    {"sum_types", module_sum_types, METH_NOARGS,
     "[(name of a torch dtype, how it is added), ...]: the dtypes that an exchange can sum."},
    {"traffic", module_traffic, METH_NOARGS,
     "[(transport, calls, bytes to other ranks, ns), ...], in the order of preference: this process's\n"
     "exchanges that did not fail."},
    {"count_traffic", module_count_traffic, METH_VARARGS,
     "count_traffic(transport, bytes, ns): adds an exchange that Python made."},
    {"threads", module_threads, METH_VARARGS,
     "threads(most, core share) -> how many copy from now on: SPAR_THREADS, or this rank's share of the\n"
     "cores, at most so many"},
    {"limits", module_limits, METH_NOARGS,
     "(cores, bytes of memory) that this process may use, by its affinity and its cgroups."},
    {"table", module_table, METH_VARARGS, table_doc},
    {"balance", module_balance, METH_VARARGS, balance_doc},
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
    PyObject *plan = spar_plan_type(), *exchange = spar_exchange_type(), *comm = spar_comm_type();
    PyObject *mode = spar_mode_type(), *turn = spar_turn_type();
    if (!plan || !exchange || !comm || !mode || !turn ||
        PyModule_AddFunctions(module, spar_py_setup_methods) < 0 ||
        PyModule_AddFunctions(module, spar_py_view_methods) < 0 ||
        PyModule_AddFunctions(module, spar_py_repeated_methods) < 0 ||
        PyModule_AddObjectRef(module, "Plan", plan) < 0 ||
        PyModule_AddObjectRef(module, "Exchange", exchange) < 0 ||
        PyModule_AddObjectRef(module, "Comm", comm) < 0 || PyModule_AddObjectRef(module, "Mode", mode) < 0 ||
        PyModule_AddObjectRef(module, "Turn", turn) < 0 ||
        PyModule_AddStringConstant(module, "version", SPAR_VERSION) < 0 ||
        PyModule_AddIntConstant(module, "SIDE_PULL", SPAR_SIDE_PULL) < 0 ||
        PyModule_AddIntConstant(module, "MOST_TENSORS", SPAR_GROUP_TENSORS) < 0 ||
        PyModule_AddIntConstant(module, "PEER_INFO_BYTES", sizeof(spar_peer_info)) < 0 ||
        PyModule_AddIntConstant(module, "TEXT_BYTES", SPAR_GROUP_TEXT) < 0 ||
        PyModule_AddIntConstant(module, "CALL_UNKNOWN", SPAR_CALL_UNKNOWN) < 0 ||
        PyModule_AddIntConstant(module, "CALL_NONE", SPAR_CALL_NONE) < 0 ||
        PyModule_AddIntConstant(module, "CALL_RUNNING", SPAR_CALL_RUNNING) < 0 ||
        PyModule_AddIntConstant(module, "CALL_ENDED", SPAR_CALL_ENDED) < 0 ||
        PyModule_AddIntConstant(module, "CALL_ABORTED", SPAR_CALL_ABORTED) < 0 ||
        PyModule_AddIntConstant(module, "CALL_ARRIVED", SPAR_CALL_ARRIVED) < 0 ||
        PyModule_AddIntConstant(module, "LONGEST_S", SPAR_LONGEST_S) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
