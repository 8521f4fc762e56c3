/* SPDX-License-Identifier: Apache-2.0 */
/* spar._C.Plan: a plan, as a Python object. */
#include "python/binding.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    spar_plan *plan;
} plan_object;

static PyTypeObject *plan_type;

const spar_plan *spar_py_plan_of(PyObject *plan)
{
    if (Py_TYPE(plan) == plan_type)
        return ((plan_object *)plan)->plan;
    PyErr_Format(PyExc_TypeError, "expected a Plan; got %R", (PyObject *)Py_TYPE(plan));
    return NULL;
}

PyObject *spar_py_plan_object(spar_plan *plan)
{
    plan_object *object = PyObject_New(plan_object, plan_type);
    if (object)
        object->plan = spar_plan_keep(plan);
    return (PyObject *)object;
}

static void plan_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    spar_plan_release(((plan_object *)self)->plan);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *plan_out_shapes(PyObject *self, void *Py_UNUSED(closure))
{
    const spar_plan *plan = ((plan_object *)self)->plan;
    PyObject *shapes = PyTuple_New(plan->ntensors);
    for (int t = 0; shapes && t < plan->ntensors; t++)
        shapes = spar_tuple_set(shapes, t, spar_ints_to_tuple(plan->tensors[t].out, plan->tensors[t].ndim));
    return shapes;
}

static int has_pull(const spar_plan *plan)
{
    if (!plan->pull)
        PyErr_SetString(PyExc_ValueError, "the plan was built without SIDE_PULL");
    return plan->pull != NULL;
}

/* Bytes sent to or received from each rank; 0 for the rank itself. */
static PyObject *plan_bytes(PyObject *self, void *pull)
{
    const spar_plan *plan = ((plan_object *)self)->plan;
    const spar_range *ranges = pull ? plan->pull : plan->push;
    PyObject *tuple = !pull || has_pull(plan) ? PyTuple_New(plan->world) : NULL;
    for (int peer = 0; tuple && peer < plan->world; peer++)
        tuple = spar_tuple_set(tuple, peer, PyLong_FromLongLong(peer == plan->rank ? 0 : ranges[peer].bytes));
    return tuple;
}

static PyObject *plan_signature(PyObject *self, PyObject *args)
{
    const char *text;
    if (!PyArg_ParseTuple(args, "s", &text))
        return NULL;
    return PyLong_FromLongLong((long long)spar_plan_signature(((plan_object *)self)->plan, text));
}

static PyObject *plan_describe(PyObject *self, PyObject *args)
{
    spar_call call = {.plan = ((plan_object *)self)->plan};
    spar_description description;
    long long number, forward;
    if (!PyArg_ParseTuple(args, "ssLL", &call.op, &call.text, &number, &forward))
        return NULL;
    call.number = number;
    call.forward = forward;
    spar_call_describe(&call, description.text, sizeof description.text, &description.gathered);
    return spar_py_description(&description);
}

int spar_read_scale(int dtype, int divide, double factor, spar_scale *scale)
{
    if (dtype < SPAR_UNSCALED || dtype >= SPAR_SCALE_TYPES) {
        PyErr_Format(PyExc_ValueError, "scale type %d", dtype);
        return -1;
    }
    *scale = (spar_scale){factor == 1 ? SPAR_UNSCALED : (spar_dtype)dtype, divide, factor};
    *scale = spar_scale_simple(scale);
    return 0;
}

/* Reads `count` addresses; -1 and an exception for another value. */
static int read_addresses(PyObject *tuple, void **addresses, int count, const char *what)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of %d addresses", what, count);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        addresses[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
        if (!addresses[i] && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *plan_pack(PyObject *self, PyObject *args)
{
    const spar_plan *plan = ((plan_object *)self)->plan;
    void *inputs[SPAR_GROUP_TENSORS];
    PyObject *tuple;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &tuple, &address) ||
        read_addresses(tuple, inputs, plan->ntensors, "inputs") < 0)
        return NULL;
    char *wire = (char *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS;
    for (int peer = 0; peer < plan->world; peer++) {
        if (peer == plan->rank)
            continue;
        spar_pack(plan, peer, (const void *const *)inputs, NULL, wire);
        wire += plan->push[peer].bytes;
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *plan_unpack(PyObject *self, PyObject *args)
{
    const spar_plan *plan = ((plan_object *)self)->plan;
    void *outputs[SPAR_GROUP_TENSORS];
    PyObject *tuple;
    spar_scale scale;
    unsigned long long address;
    int dtype, divide;
    double factor;
    if (!PyArg_ParseTuple(args, "KOipd", &address, &tuple, &dtype, &divide, &factor) ||
        read_addresses(tuple, outputs, plan->ntensors, "outputs") < 0 || !has_pull(plan) ||
        spar_read_scale(dtype, divide, factor, &scale) < 0)
        return NULL;
    const char *wire = (const char *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS;
    for (int peer = 0; peer < plan->world; peer++) {
        if (peer == plan->rank)
            continue;
        spar_unpack(plan, peer, wire, outputs, &scale);
        wire += plan->pull[peer].bytes;
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *plan_copy_own(PyObject *self, PyObject *args)
{
    const spar_plan *plan = ((plan_object *)self)->plan;
    void *inputs[SPAR_GROUP_TENSORS], *outputs[SPAR_GROUP_TENSORS];
    PyObject *in, *out;
    spar_scale scale;
    int dtype, divide;
    double factor;
    if (!PyArg_ParseTuple(args, "OOipd", &in, &out, &dtype, &divide, &factor) ||
        read_addresses(in, inputs, plan->ntensors, "inputs") < 0 ||
        read_addresses(out, outputs, plan->ntensors, "outputs") < 0 ||
        spar_read_scale(dtype, divide, factor, &scale) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    spar_copy_own(plan, (const void *const *)inputs, outputs, &scale);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *block_to_tuple(int peer, const spar_block *block, const spar_dim *dims, int64_t dst)
{
    PyObject *loops = PyTuple_New(block->ndim);
    for (int i = 0; loops && i < block->ndim; i++)
        loops = spar_tuple_set(
            loops, i,
            Py_BuildValue("LLL", (long long)dims[i].extent, (long long)dims[i].src, (long long)dims[i].dst));
    return Py_BuildValue("iiLLLN", peer, (int)block->tensor, (long long)block->src, (long long)dst,
                         (long long)block->run, loops);
}

PyDoc_STRVAR(plan_blocks_doc,
             "blocks(side) -> [(peer, tensor, src, dst, run, ((extent, src, dst), ...)), ...]\n\n"
             "In bytes. side: 'push' (inputs to the peers' outputs), 'pack' (inputs to the packed bytes for\n"
             "each peer), 'pull' (each peer's packed bytes to the outputs).");

static PyObject *plan_blocks(PyObject *self, PyObject *args)
{
    const spar_plan *plan = ((plan_object *)self)->plan;
    const char *side;
    if (!PyArg_ParseTuple(args, "s", &side))
        return NULL;
    int pull = strcmp(side, "pull") == 0, pack = strcmp(side, "pack") == 0;
    if (!pull && !pack && strcmp(side, "push") != 0)
        return PyErr_Format(PyExc_ValueError, "side is '%s'; known: push, pack, pull", side);
    if (pull && !has_pull(plan))
        return NULL;
    PyObject *list = PyList_New(0);
    for (int peer = 0; peer < plan->world; peer++) {
        const spar_range *range = pull ? &plan->pull[peer] : &plan->push[peer];
        int64_t at = 0; /* in the packed bytes */
        for (int64_t i = 0; list && i < range->count; i++) {
            const spar_block *block = &plan->blocks[range->first + i];
            spar_dim packed[SPAR_MAX_DIMS];
            int64_t bytes = spar_packed_dims(plan, block, 0, packed);
            const spar_dim *dims = pack ? packed : plan->dims + block->dims;
            list = spar_list_add(list, block_to_tuple(peer, block, dims, pack ? at : block->dst));
            at += bytes;
        }
    }
    return list;
}

static PyGetSetDef plan_getset[] = {
    {"out_shapes", plan_out_shapes, NULL, "extents of each tensor's output on this rank", NULL},
    {"push_bytes", plan_bytes, NULL, "packed bytes that go to each rank; 0 for oneself", NULL},
    {"pull_bytes", plan_bytes, NULL, "packed bytes that come from each rank; 0 for oneself", "pull"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef plan_methods[] = {
    {"signature", plan_signature, METH_VARARGS,
     "signature(text): 64 bits, signed; equal on all ranks that make the same call with the same text."},
    {"describe", plan_describe, METH_VARARGS,
     "describe(op, text, number, forward): (a line about the global call, what this rank holds of the\n"
     "gathered dim)"},
    {"pack", plan_pack, METH_VARARGS, "pack(inputs, wire): host memory, all peers in rank order."},
    {"unpack", plan_unpack, METH_VARARGS, "unpack(wire, outputs, scale_type, divide, factor)"},
    {"copy_own", plan_copy_own, METH_VARARGS, "copy_own(inputs, outputs, scale_type, divide, factor)"},
    {"blocks", plan_blocks, METH_VARARGS, plan_blocks_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "An exchange plan of one rank."},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_getset, plan_getset},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "spar._C.Plan",
    .basicsize = sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = plan_slots,
};

PyObject *spar_plan_type(void)
{
    plan_type = (PyTypeObject *)PyType_FromSpec(&plan_spec);
    return (PyObject *)plan_type;
}
