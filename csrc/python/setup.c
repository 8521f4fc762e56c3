/* SPDX-License-Identifier: Apache-2.0 */
/* What a group's set-up asks of the core: what ranks send of themselves, and what follows from it. */
#include "python/binding.h"
#include "base/cores.h"
#include "base/env.h"

#include <stdlib.h>
#include <string.h>

spar_peer_info *spar_py_peer_infos(const char *bytes, Py_ssize_t size)
{
    if (size == 0 || size % (Py_ssize_t)sizeof(spar_peer_info) != 0) {
        PyErr_Format(PyExc_ValueError, "peer infos of %zd bytes; expected a multiple of %zu", size,
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

/* The same of a function's only argument, and its bytes. */
static spar_peer_info *only_argument(PyObject *args, Py_ssize_t *size)
{
    const char *bytes;
    return PyArg_ParseTuple(args, "y#", &bytes, size) ? spar_py_peer_infos(bytes, *size) : NULL;
}

static PyObject *module_peer_info(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *host = NULL;
    Py_ssize_t size = 0;
    spar_peer_info info;
    if (!PyArg_ParseTuple(args, "|y#", &host, &size))
        return NULL;
    spar_env_read();
    spar_peer_info_read(&info);
    if (host)
        memcpy(info.host, host, (size_t)size < sizeof info.host ? (size_t)size : sizeof info.host);
    return PyBytes_FromStringAndSize((const char *)&info, sizeof info);
}

static PyObject *module_core_share(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    int rank, local_ranks;
    if (!PyArg_ParseTuple(args, "y#ii", &bytes, &size, &rank, &local_ranks))
        return NULL;
    spar_peer_info *info = spar_py_peer_infos(bytes, size);
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
    spar_peer_info *info = spar_py_peer_infos(bytes, size);
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

static PyObject *module_hosts(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t size = 0;
    spar_peer_info *info = only_argument(args, &size);
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
    spar_env_read();
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
    Py_ssize_t size = 0;
    spar_peer_info *info = only_argument(args, &size);
    for (Py_ssize_t rank = 0; info && rank < size / (Py_ssize_t)sizeof *info; rank++)
        info[rank].host[0] = (uint64_t)rank;
    PyObject *result = info ? PyBytes_FromStringAndSize((const char *)info, size) : NULL;
    free(info);
    return result;
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

static PyObject *module_connections(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    spar_peers_counts counts = spar_peers_count();
    return Py_BuildValue("LLi", (long long)counts.foreign, (long long)counts.unproven, counts.pending);
}

PyMethodDef spar_py_setup_methods[] = {
    {"peer_info", module_peer_info, METH_VARARGS,
     "peer_info(host=b'') -> this rank's, as bytes. host: at most 16 bytes, equal where processes may share\n"
     "memory."},
    {"core_share", module_core_share, METH_VARARGS,
     "core_share(peer info of all ranks, rank, local ranks) -> how many cores are this rank's own; 0: it\n"
     "shares one"},
    {"choose", module_choose, METH_VARARGS,
     "choose(all ranks' peer_info, device, ((refused name, reason), ...), first_rank=0)\n"
     "    -> (name, reason, ((rejected name, reason), ...))"},
    {"setup_failure", module_setup_failure, METH_VARARGS,
     "setup_failure(all ranks' setup_result) -> (rank, reason) of the first failure; None: there is none."},
    {"hosts", module_hosts, METH_VARARGS,
     "hosts(all ranks' peer_info)\n"
     "    -> [(lowest rank of the same host, lowest with which it shares memory), ...]"},
    {"own_address", module_own_address, METH_NOARGS,
     "The address at which ranks of other hosts reach this one. May ask a name server."},
    {"part_hosts", module_part_hosts, METH_VARARGS,
     "part_hosts(all ranks' peer_info) -> the same, as if each rank were on a host of its own"},
    {"processes", module_processes, METH_O,
     "processes(all ranks' peer_info) -> [(process id, nonce), ...]; 0: not known"},
    {"connections", module_connections, METH_NOARGS,
     "connections() -> (closed: of another user, closed: unproven, open and not proven yet)"},
    {NULL, NULL, 0, NULL},
};
