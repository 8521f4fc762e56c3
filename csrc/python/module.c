/* SPDX-License-Identifier: Apache-2.0 */
/* The module spar._C. */
#include "python/binding.h"
#include "base/cgroup.h"
#include "base/cores.h"
#include "base/env.h"
#include "transports/nccl/pipeline.h"
#include "base/dynlib.h"
#include "devices/cpu/threads.h"
#include "control/last_call.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static PyObject *module_peer_info(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *host = NULL;
    Py_ssize_t size = 0;
    spar_peer_info info;
    if (!PyArg_ParseTuple(args, "|y#", &host, &size))
        return NULL;
    spar_peer_info_read(&info);
    if (host)
        memcpy(info.host, host, (size_t)size < sizeof info.host ? (size_t)size : sizeof info.host);
    return PyBytes_FromStringAndSize((const char *)&info, sizeof info);
}

/* A copy of the ranks' peer infos, whose bytes may not be aligned. */
static spar_peer_info *peer_infos(const char *bytes, Py_ssize_t size)
{
    if (size == 0 || size % (Py_ssize_t)sizeof(spar_peer_info) != 0) {
        PyErr_Format(PyExc_ValueError, "facts of %zd bytes; expected a multiple of %zu", size,
                     sizeof(spar_peer_info));
        return NULL;
    }
    spar_peer_info *info = malloc((size_t)size);
    if (!info)
        PyErr_NoMemory();
    else
        memcpy(info, bytes, (size_t)size);
    return info;
}

static PyObject *module_core_share(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    int rank, local_ranks;
    if (!PyArg_ParseTuple(args, "y#ii", &bytes, &size, &rank, &local_ranks))
        return NULL;
    spar_peer_info *info = peer_infos(bytes, size);
    if (!info)
        return NULL;
    int world = (int)(size / (Py_ssize_t)sizeof *info);
    PyObject *share =
        rank < 0 || rank >= world
            ? PyErr_Format(PyExc_ValueError, "rank %d of %d", rank, world)
            : PyLong_FromLong(spar_core_share(&info->cores, sizeof *info, world, rank, local_ranks));
    free(info);
    return share;
}

static PyObject *module_choose(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *bytes, *device;
    PyObject *refusals;
    Py_ssize_t size;
    int first_rank = 0;
    spar_choice choice;
    spar_refusal refused = {0};
    if (!PyArg_ParseTuple(args, "y#sO!|i", &bytes, &size, &device, &PyTuple_Type, &refusals, &first_rank))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(refusals) && i < 16; i++, refused.count++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(refusals, i), "ss", &refused.names[i], &refused.reasons[i]))
            return NULL;
    spar_peer_info *info = peer_infos(bytes, size);
    if (!info)
        return NULL;
    spar_status status =
        spar_choose(info, (int)(size / (Py_ssize_t)sizeof *info), first_rank, device, &refused, &choice);
    free(info);
    if (status != SPAR_OK)
        return spar_raise(status);
    PyObject *rejected = PyTuple_New(choice.rejected);
    for (int i = 0; rejected && i < choice.rejected; i++)
        rejected = spar_tuple_set(rejected, i,
                                  Py_BuildValue("ss", choice.rejected_names[i], choice.rejected_reasons[i]));
    return rejected ? Py_BuildValue("ssN", choice.transport->name, choice.reason, rejected) : NULL;
}

static PyObject *module_setup_failure(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y#", &bytes, &size))
        return NULL;
    spar_setup_result *results = malloc((size_t)size + 1); /* the bytes may not be aligned */
    if (!results)
        return PyErr_NoMemory();
    memcpy(results, bytes, (size_t)size);
    spar_status status = spar_setup_failure(results, (int)(size / (Py_ssize_t)sizeof *results));
    free(results);
    if (status == SPAR_OK)
        Py_RETURN_NONE;
    return Py_BuildValue("iN", spar_last_error_ranks()->rank[0], spar_text(spar_last_error()));
}

static PyObject *module_env(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *field;
    spar_env_value value;
    if (!PyArg_ParseTuple(args, "s", &field))
        return NULL;
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

static PyObject *module_processes(PyObject *Py_UNUSED(module), PyObject *info)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(info, &bytes, &size) < 0)
        return NULL;
    PyObject *result = PyList_New(0);
    for (Py_ssize_t at = 0; result && at + (Py_ssize_t)sizeof(spar_peer_info) <= size;
         at += (Py_ssize_t)sizeof(spar_peer_info)) {
        spar_endpoint endpoint;
        memcpy(&endpoint, bytes + at + offsetof(spar_peer_info, endpoint), sizeof endpoint);
        result = spar_list_add(
            result, Py_BuildValue("LK", (long long)endpoint.pid, (unsigned long long)endpoint.nonce));
    }
    return result;
}

static PyObject *module_hosts(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y#", &bytes, &size))
        return NULL;
    spar_peer_info *info = peer_infos(bytes, size);
    int *hosts = info ? malloc((size_t)size / sizeof *info * sizeof *hosts) : NULL;
    PyObject *result = hosts ? PyList_New(0) : NULL;
    if (hosts)
        spar_hosts(info, (int)(size / (Py_ssize_t)sizeof *info), hosts);
    else if (info)
        PyErr_NoMemory();
    for (Py_ssize_t rank = 0; result && rank < size / (Py_ssize_t)sizeof *info; rank++) {
        Py_ssize_t same = 0;
        while (memcmp(info[same].host, info[rank].host, sizeof info->host) != 0)
            same++;
        result = spar_list_add(result, Py_BuildValue("ni", same, hosts[rank]));
    }
    free(hosts);
    free(info);
    return result;
}

static PyObject *module_own_address(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    char text[SPAR_TCP_TEXT];
    spar_tcp_endpoint own = {0};
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_tcp_own_address(&own);
    Py_END_ALLOW_THREADS;
    if (status != SPAR_OK)
        return spar_raise(status);
    spar_tcp_address_text(&own, text);
    return spar_text(text);
}

static PyObject *module_part_hosts(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y#", &bytes, &size))
        return NULL;
    spar_peer_info *info = peer_infos(bytes, size);
    for (Py_ssize_t rank = 0; info && rank < size / (Py_ssize_t)sizeof *info; rank++)
        info[rank].host[0] = (uint64_t)rank;
    PyObject *result = info ? PyBytes_FromStringAndSize((const char *)info, size) : NULL;
    free(info);
    return result;
}

static PyObject *module_connections(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    spar_peers_counts counts = spar_peers_count();
    return Py_BuildValue("LLi", (long long)counts.foreign, (long long)counts.unproven, counts.pending);
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

static PyObject *module_device_stats(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int64_t peak, total;
    spar_staging_stats(&peak, &total);
    return Py_BuildValue("LL", (long long)peak, (long long)total);
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
    {"device_stats", module_device_stats, METH_NOARGS,
     "(peak, total) of the staging memory of calls on GPUs, in bytes"},
    {"set_library_path", module_set_library_path, METH_VARARGS,
     "set_library_path(library, path or None): where \"libnccl\" or \"libnvrtc\" lies in a package."},
    {"peer_info", module_peer_info, METH_VARARGS,
     "peer_info(host=b'') -> this rank's, as bytes. host: at most 16 bytes, equal where processes may share\n"
     "memory."},
    {"choose", module_choose, METH_VARARGS,
     "choose(all ranks' peer_info, device, ((refused name, reason), ...), first_rank=0)\n"
     "    -> (name, reason, ((rejected name, reason), ...))"},
    {"setup_failure", module_setup_failure, METH_VARARGS,
     "setup_failure(all ranks' setup_result) -> (rank, reason) of the first failure; None: there is none."},
    {"hosts", module_hosts, METH_VARARGS,
     "hosts(all ranks' peer_info)\n"
     "    -> [(lowest rank of the same host, lowest with which it shares memory), ...]"},
    {"part_hosts", module_part_hosts, METH_VARARGS,
     "part_hosts(all ranks' peer_info) -> the same, as if each rank were on a host of its own"},
    {"own_address", module_own_address, METH_NOARGS,
     "The address at which ranks of other hosts reach this one. May ask a name server."},
    {"processes", module_processes, METH_O,
     "processes(all ranks' peer_info) -> [(process id, nonce), ...]; 0: not known"},
    {"connections", module_connections, METH_NOARGS,
     "connections() -> (closed: of another user, closed: unproven, open and not proven yet)"},
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
    {"core_share", module_core_share, METH_VARARGS,
     "core_share(peer info of all ranks, rank, local ranks) -> how many cores are this rank's own; 0: it\n"
     "shares one"},
    {"limits", module_limits, METH_NOARGS,
     "(cores, bytes of memory) that this process may use, by its affinity and its cgroups."},
    {"table", module_table, METH_VARARGS, table_doc},
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
    if (!plan || !exchange || !comm || PyModule_AddObjectRef(module, "Plan", plan) < 0 ||
        PyModule_AddObjectRef(module, "Exchange", exchange) < 0 ||
        PyModule_AddObjectRef(module, "Comm", comm) < 0 ||
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
